"""Space in host memory or in files, allocated and freed in any sizes and order.

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
    """`nbytes` of host memory (a tensor) or a file, and the gaps that are free."""

    backing: Any
    nbytes: int
    gaps: list[Interval]

    def take(self, nbytes: int) -> Allocation | None:
        """Allocate in the first gap that is large enough; None if there is none."""
        for i, gap in enumerate(self.gaps):
            if gap.size >= nbytes:
                end = gap.start + nbytes
                self.gaps[i : i + 1] = [rest] if (rest := Interval(end, gap.stop)) else []
                return Allocation(self, gap.start, end)
        return None


class Space:
    """Space that grows by segments of at least an eighth of its size. `open` makes a segment, `close` frees
    one."""

    def __init__(self, open: Callable[[int], Any], close: Callable[[Any], object]) -> None:
        self._open, self._close = open, close
        self.segments: list[Segment] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    def grow(self, nbytes: int) -> None:
        """Add a segment of so many bytes."""
        self.segments.append(Segment(self._open(nbytes), nbytes, [Interval(0, nbytes)]))

    def take(self, nbytes: int) -> Allocation:
        """Allocate so many bytes at a page; for 0 bytes, anywhere."""
        nbytes = padded(nbytes)
        if not nbytes:
            return Allocation(self.segments[0], 0, 0)
        for segment in self.segments:
            if (allocation := segment.take(nbytes)) is not None:
                return allocation
        for segment in [each for each in self.segments if each.gaps == [(0, each.nbytes)]]:
            self._close(segment.backing)  # unused, and too small for this allocation
            self.segments.remove(segment)
        self.grow(nbytes * max(1, self.nbytes // 8 // nbytes))
        allocation = self.segments[-1].take(nbytes)
        assert allocation is not None
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free the allocation, to be taken again."""
        allocation.segment.gaps = union(
            [*allocation.segment.gaps, Interval(allocation.start, allocation.stop)]
        )

    def close(self) -> None:
        """Free all segments."""
        for segment in self.segments:
            self._close(segment.backing)
        self.segments.clear()
