"""Half-open intervals [start, stop) of elements or bytes: overlap, union, gaps, chunks and alignment. Pure.

Every module that compares, joins, cuts or aligns ranges does it with these functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol


class HasBounds(Protocol):
    """Anything with a start and a stop: an Interval, a slot, a run, a slice."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Interval(NamedTuple):
    """The integers from `start` to before `stop`. An empty interval is false."""

    start: int
    stop: int

    def __bool__(self) -> bool:
        return self.start < self.stop

    @property
    def size(self) -> int:
        """The number of integers in it."""
        return max(0, self.stop - self.start)

    def since(self, origin: int) -> slice:
        """Return the same integers as a slice of a sequence whose first element is number `origin`."""
        return slice(self.start - origin, self.stop - origin)


def overlap(a: HasBounds, b: HasBounds) -> Interval:
    """Return the integers that are in both; some empty interval where there are none."""
    start = max(a.start, b.start)
    return Interval(start, max(start, min(a.stop, b.stop)))


def union(intervals: Iterable[tuple[int, int]]) -> list[Interval]:
    """Return the same integers in as few intervals as possible, in rising order, none of them empty."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1].stop:
            found[-1] = Interval(found[-1].start, max(stop, found[-1].stop))
        elif start < stop:
            found.append(Interval(start, stop))
    return found


def gaps(intervals: Iterable[tuple[int, int]], within: HasBounds) -> list[Interval]:
    """Return the gaps in `within`: its integers that are in none of the intervals, as intervals in rising
    order."""
    found, at = [], within.start
    for start, stop in union(intervals):
        if between := overlap(Interval(at, start), within):
            found.append(between)
        at = max(at, stop)
    return [*found, rest] if (rest := overlap(Interval(at, within.stop), within)) else found


def chunks(whole: HasBounds, size: int) -> Iterator[Interval]:
    """Cut an interval into consecutive ones of `size`; the last may be smaller."""
    for start in range(whole.start, whole.stop, size):
        yield Interval(start, min(start + size, whole.stop))


def cut_at_multiples(whole: HasBounds, unit: int) -> Iterator[Interval]:
    """Cut an interval at every multiple of `unit`."""
    start = whole.start
    while start < whole.stop:
        stop = min(round_down(start, unit) + unit, whole.stop)
        yield Interval(start, stop)
        start = stop


def ceil_div(count: int, unit: int) -> int:
    """Return `count / unit`, rounded up."""
    return -(-count // unit)


def round_up(count: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `count`."""
    return ceil_div(count, unit) * unit


def round_down(count: int, unit: int) -> int:
    """Return the largest multiple of `unit` that is not above `count`."""
    return count // unit * unit
