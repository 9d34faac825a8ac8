"""An arena: host memory or files that are allocated and freed in any order and size, such as for activations.

Invariant: places that are taken do not overlap, and begin at a page. No communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from polyreme.files.direct_io import File, padded
from polyreme.layout.intervals import Interval, union


@dataclass(frozen=True)
class Allocation:
    """Bytes [start, stop) of a segment."""

    segment: _Segment
    start: int
    stop: int

    @property
    def memory(self) -> Tensor:
        """The bytes, of host memory."""
        assert isinstance(self.segment.backing, Tensor)
        return self.segment.backing[self.start : self.stop]

    @property
    def file(self) -> File:
        """The file that has them, from `start` on."""
        assert isinstance(self.segment.backing, File)
        return self.segment.backing


@dataclass(eq=False)
class _Segment:
    backing: Tensor | File
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

    def free(self, allocation: Allocation) -> None:
        self.gaps = union([*self.gaps, Interval(allocation.start, allocation.stop)])


class Arena:
    """Host memory or files, of which any number of bytes is taken and freed in any order; it grows by an
    eighth at a time. `open` makes a segment; `finish` is called before one is given back."""

    def __init__(
        self, open: Callable[[int], Tensor | File], finish: Callable[[], None] = lambda: None
    ) -> None:
        self._open, self._finish = open, finish
        self._segments: list[_Segment] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self._segments)

    def take(self, nbytes: int) -> Allocation:
        """Room for so many bytes, at a page."""
        nbytes = padded(nbytes)
        for segment in self._segments:
            if (allocation := segment.take(nbytes)) is not None:
                return allocation
        used = [segment for segment in self._segments if segment.gaps != [(0, segment.nbytes)]]
        if len(used) < len(self._segments):  # the others are too small for this shape of batch
            self._finish()
            self._segments = used
        size = nbytes * max(1, self.nbytes // 8 // nbytes)
        segment = _Segment(self._open(size), size, [Interval(0, size)])
        self._segments.append(segment)
        allocation = segment.take(nbytes)
        assert allocation is not None
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give the room back, to be taken again."""
        allocation.segment.free(allocation)

    def close(self) -> None:
        """Close its files."""
        for segment in self._segments:
            if isinstance(segment.backing, File):
                segment.backing.close()
        self._segments.clear()
