"""Space in host memory or in files, in which allocations of any size are taken and freed in any order.

Invariant: allocations do not overlap, and begin at a page. No communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyreme.files.direct_io import padded
from polyreme.layout.intervals import Interval, union


@dataclass(frozen=True)
class Allocation:
    """Bytes [start, stop) of a segment."""

    segment: Segment
    start: int
    stop: int


@dataclass(eq=False)
class Segment:
    """`nbytes` of host memory (a tensor) or a file, and what of them is free."""

    backing: Any
    nbytes: int
    gaps: list[Interval]

    def take(self, nbytes: int) -> Allocation | None:
        """The first gap's beginning that is large enough."""
        for i, gap in enumerate(self.gaps):
            if gap.size >= nbytes:
                end = gap.start + nbytes
                self.gaps[i : i + 1] = [rest] if (rest := Interval(end, gap.stop)) else []
                return Allocation(self, gap.start, end)
        return None


class Space:
    """Grows by segments, which `open` makes, of an eighth of what there is at least; `close` gets one that
    goes."""

    def __init__(self, open: Callable[[int], Any], close: Callable[[Any], object]) -> None:
        self._open, self._close = open, close
        self.segments: list[Segment] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    def grow(self, nbytes: int) -> None:
        """Take a segment of so many bytes."""
        self.segments.append(Segment(self._open(nbytes), nbytes, [Interval(0, nbytes)]))

    def take(self, nbytes: int) -> Allocation:
        """Room for so many bytes, at a page; for none anywhere."""
        nbytes = padded(nbytes)
        if not nbytes:
            return Allocation(self.segments[0], 0, 0)
        for segment in self.segments:
            if (allocation := segment.take(nbytes)) is not None:
                return allocation
        for segment in [each for each in self.segments if each.gaps == [(0, each.nbytes)]]:
            self._close(segment.backing)  # it is unused, and too small for what comes now
            self.segments.remove(segment)
        self.grow(nbytes * max(1, self.nbytes // 8 // nbytes))
        allocation = self.segments[-1].take(nbytes)
        assert allocation is not None
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give the room back, to be taken again."""
        allocation.segment.gaps = union(
            [*allocation.segment.gaps, Interval(allocation.start, allocation.stop)]
        )

    def close(self) -> None:
        """Give all segments back."""
        for segment in self.segments:
            self._close(segment.backing)
        self.segments.clear()
