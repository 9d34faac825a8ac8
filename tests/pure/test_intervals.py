"""Intervals against sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polyreme.layout.intervals import (
    Interval,
    ceil_div,
    chunks,
    cut_at_multiples,
    gaps,
    overlap,
    round_down,
    round_up,
    union,
)

BOUND = st.integers(-20, 60)
INTERVALS = st.builds(Interval, BOUND, BOUND)
UNITS = st.integers(1, 17)


def members(*intervals: Interval) -> set[int]:
    return {i for each in intervals for i in range(each.start, each.stop)}


def are_apart(intervals: list[Interval]) -> bool:
    """Whether they rise, none is empty, and no two could be one."""
    return all(intervals) and all(a.stop < b.start for a, b in pairwise(intervals))


@given(INTERVALS, INTERVALS)
def test_overlap_is_the_intersection(a: Interval, b: Interval) -> None:
    both = overlap(a, b)
    assert members(both) == members(a) & members(b)
    assert both.size == both.stop - both.start == len(members(both)) and bool(both) == (both.size > 0)


@given(st.lists(INTERVALS, max_size=6), INTERVALS)
def test_union_and_gaps_divide_a_range(several: list[Interval], whole: Interval) -> None:
    joined, between = union(several), gaps(several, whole)
    assert members(*joined) == members(*several) and are_apart(joined)
    assert members(*between) == members(whole) - members(*several) and are_apart(between)


@given(INTERVALS, UNITS)
def test_chunks_and_cuts_divide_an_interval(whole: Interval, unit: int) -> None:
    even, aligned = [*chunks(whole, unit)], [*cut_at_multiples(whole, unit)]
    for found in (even, aligned):
        assert [i for each in found for i in range(*each)] == [*range(*whole)] and all(found)
    assert all(each.size == unit for each in even[:-1]) and all(each.size <= unit for each in even)
    assert all(each.stop % unit == 0 for each in aligned[:-1]) and all(each.size <= unit for each in aligned)


@given(st.integers(-1000, 1000), UNITS)
def test_rounding(count: int, unit: int) -> None:
    assert round_down(count, unit) <= count <= round_up(count, unit)
    assert round_up(count, unit) - round_down(count, unit) in (0, unit)
    assert round_up(count, unit) == ceil_div(count, unit) * unit and round_down(count, unit) % unit == 0


@given(INTERVALS.filter(bool), st.integers(0, 30))
def test_since_addresses_a_sequence(part: Interval, before: int) -> None:
    origin = part.start - before
    assert [*range(origin, part.stop + 3)][part.since(origin)] == [*range(*part)]
