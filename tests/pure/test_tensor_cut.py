"""Cut: split then join is the identity for any number of ranks, uneven vocabulary and packed sections; every
number has one owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyreme.layout.bucket_layout import Cut


@st.composite
def cuts(draw: Any) -> Cut:
    ways = draw(st.integers(1, 8))
    before = draw(st.lists(st.integers(1, 3), max_size=2))
    behind = draw(st.lists(st.integers(1, 3), max_size=2))

    def shape(size: int) -> tuple[int, ...]:
        return (*before, size, *behind)

    kind = draw(st.sampled_from(["whole", "padded", "packed"]))
    if kind == "whole":
        return Cut.whole(draw(st.sampled_from([(), (5,), shape(4)])), ways)
    if kind == "padded":
        return Cut.padded(shape(draw(st.integers(ways, 50))), len(before), ways)
    units = [
        draw(st.integers(1, 3)) * ways
        if draw(st.booleans())
        else draw(st.sampled_from([n for n in range(1, 9) if ways % n == 0]))
        for _ in range(draw(st.integers(1, 4)))
    ]
    sections = [(draw(st.integers(1, 3)) * count, count) for count in units]
    return Cut.packed(shape(sum(size for size, _ in sections)), len(before), ways, sections)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)


@given(cuts())
def test_split_then_join_is_the_identity(cut: Cut) -> None:
    whole = numbered(cut.shape)
    parts = [cut.split(whole, rank) for rank in range(len(cut.pieces))]
    assert all(part.shape == cut.local and part.is_contiguous() for part in parts)
    assert torch.equal(cut.join(parts), whole)


@given(cuts())
def test_every_number_has_one_owner_and_padding_none(cut: Cut) -> None:
    whole = numbered(cut.shape)
    owned: list[float] = []
    for rank in range(len(cut.pieces)):
        part = cut.split(whole, rank)
        for start, stop in cut.owned(rank):
            assert stop <= cut.used(rank)
            owned += (part.narrow(cut.dim, start, stop - start) if cut.shape else part).reshape(-1).tolist()
        if cut.shape:
            assert not part.narrow(cut.dim, cut.used(rank), cut.length - cut.used(rank)).any()
            assert part.narrow(cut.dim, 0, cut.used(rank)).all()
    assert sorted(owned) == whole.reshape(-1).tolist()


@given(cuts())
def test_put_writes_what_split_read_and_nothing_else(cut: Cut) -> None:
    whole = numbered(cut.shape)
    for rank in range(len(cut.pieces)):
        written = cut.put(cut.split(whole, rank), rank, torch.zeros_like(whole))
        assert torch.equal(written[written != 0], whole[written != 0])
        assert int((written != 0).sum()) == torch.Size(cut.local).numel() - (
            (cut.length - cut.used(rank)) * torch.Size(cut.local).numel() // cut.length
        )


def test_packed_query_key_value() -> None:
    # four query heads of two, two key and two value heads
    cut = Cut.packed((16, 3), 0, 4, [(8, 4), (4, 2), (4, 2)])
    assert cut.pieces == (
        ((0, 2), (8, 10), (12, 14)),
        ((2, 4), (8, 10), (12, 14)),
        ((4, 6), (10, 12), (14, 16)),
        ((6, 8), (10, 12), (14, 16)),
    )
    assert [cut.owned(rank) for rank in range(4)] == [[(0, 6)], [(0, 2)], [(0, 6)], [(0, 2)]]
    assert cut.local == (6, 3) and not cut.is_whole


def test_uneven_vocabulary() -> None:
    cut = Cut.padded((97, 3), 0, 4)
    assert [cut.used(rank) for rank in range(4)] == [24, 24, 24, 25] and cut.local == (25, 3)


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: Cut.even((7,), 0, 2), "7 elements cannot be divided by 2"),
    (lambda: Cut.packed((12,), 0, 4, [(12, 3)]), "3 units of 12 elements cannot be divided by 4"),
    (lambda: Cut.padded((3, 5), 0, 4), "3 elements cannot be divided by 4"),
])  # fmt: skip
def test_what_cannot_be_divided(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()
