"""Half-open intervals [start, stop) of elements or bytes: overlap, union, gaps, chunks and alignment. Pure.

Every module that compares, joins, cuts or aligns ranges does it with these functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol


class HasBounds(Protocol):
    """Anything with a beginning and an end: an Interval, a slot, a run, a slice."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Interval(NamedTuple):
    """The integers from `start` on, before `stop`. It is true where there are any."""

    start: int
    stop: int

    def __bool__(self) -> bool:
        return self.start < self.stop

    @property
    def size(self) -> int:
        """How many integers it has."""
        return max(0, self.stop - self.start)

    def since(self, origin: int) -> slice:
        """The same integers as a slice of a sequence whose first element is number `origin`."""
        return slice(self.start - origin, self.stop - origin)


def overlap(a: HasBounds, b: HasBounds) -> Interval:
    """What is in both; [x, x) for some x where nothing is."""
    start = max(a.start, b.start)
    return Interval(start, max(start, min(a.stop, b.stop)))


def union(intervals: Iterable[tuple[int, int]]) -> list[Interval]:
    """The same integers in as few intervals as can be, in rising order, none of them empty."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1].stop:
            found[-1] = Interval(found[-1].start, max(stop, found[-1].stop))
        elif start < stop:
            found.append(Interval(start, stop))
    return found


def gaps(intervals: Iterable[tuple[int, int]], within: HasBounds) -> list[Interval]:
    """What of `within` is in none of the intervals, in rising order."""
    found, at = [], within.start
    for start, stop in union(intervals):
        if between := overlap(Interval(at, start), within):
            found.append(between)
        at = max(at, stop)
    return [*found, rest] if (rest := overlap(Interval(at, within.stop), within)) else found


def chunks(whole: HasBounds, size: int) -> Iterator[Interval]:
    """The interval in consecutive ones of `size`, of which the last may have less."""
    for start in range(whole.start, whole.stop, size):
        yield Interval(start, min(start + size, whole.stop))


def cut_at_multiples(whole: HasBounds, unit: int) -> Iterator[Interval]:
    """The interval in consecutive ones, cut at every multiple of `unit`."""
    start = whole.start
    while start < whole.stop:
        stop = min(round_down(start, unit) + unit, whole.stop)
        yield Interval(start, stop)
        start = stop


def ceil_div(count: int, unit: int) -> int:
    """`count / unit`, rounded up."""
    return -(-count // unit)


def round_up(count: int, unit: int) -> int:
    """The first multiple of `unit` that is not below `count`."""
    return ceil_div(count, unit) * unit


def round_down(count: int, unit: int) -> int:
    """The last multiple of `unit` that is not above `count`."""
    return count // unit * unit
