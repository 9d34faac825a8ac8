"""Memory of a GPU as torch's allocator takes it, for sequences whose outcome follows from its rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyreme.planner.allocator import LARGE_SEGMENT, LEAST, SMALL_SEGMENT, Allocator, taken

MIB = 1 << 20


def used(found: Allocator) -> int:
    """The bytes of all blocks in use."""
    return sum(piece.size for piece in found._used.values())


def test_sizes_are_rounded_and_segments_are_shared() -> None:
    found = taken([("a", 1), ("b", 513), ("c", MIB)])
    assert (used(found), found.reserved) == (512 + 1024 + MIB, SMALL_SEGMENT)
    found.change("d", MIB)  # what is left of the segment is less
    assert found.reserved == 2 * SMALL_SEGMENT


def test_large_tensors_have_segments_of_their_own() -> None:
    found = taken([("a", 3 * MIB), ("b", 17 * MIB + 1)])
    assert (used(found), found.reserved) == (3 * MIB + 18 * MIB, LARGE_SEGMENT + 18 * MIB)
    found.change("c", 17 * MIB - LEAST)  # in the rest of the first, whose last bytes stay with it
    assert (used(found), found.reserved) == (38 * MIB, LARGE_SEGMENT + 18 * MIB)
    found.change("d", 15 * MIB)
    assert found.reserved == LARGE_SEGMENT + 18 * MIB + 16 * MIB


def test_free_neighbours_join() -> None:
    found = taken([("a", 5 * MIB), ("b", 5 * MIB), ("c", 10 * MIB - LEAST)])
    assert found.reserved == LARGE_SEGMENT
    for owner in ("a", "b"):
        found.change(owner, 0)
    found.change("d", 10 * MIB)
    assert found.reserved == LARGE_SEGMENT


def test_memory_that_grows_is_elsewhere_before_it_is_free() -> None:
    found = Allocator()
    found.change("a", 12 * MIB)
    found.change("a", 14 * MIB)
    assert (used(found), found.reserved) == (14 * MIB, 26 * MIB)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40 * MIB)), max_size=60))
def test_blocks_fill_segments_exactly(steps: list[tuple[int, int]]) -> None:
    found = Allocator()
    for owner, nbytes in steps:
        found.change(owner, nbytes)
        free = sum(size for pieces in found._free.values() for size, _, _ in pieces)
        assert used(found) + free == found.reserved
        for piece in found._used.values():
            assert not piece.free and piece.size % LEAST == 0
    for owner in range(10):
        found.change(owner, 0)
    assert used(found) == 0
    assert all(
        piece.before is None and piece.after is None for each in found._free.values() for *_, piece in each
    )
