"""The numbers that ranks hold, and where they are in the whole tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.region import StridedRange, strided_ranges


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, int]:
    """A cut of any kind, along one dimension or several, and over how many ranks."""
    cut, ways = draw(single())
    for dim in draw(st.permutations(range(len(cut.shape))))[: draw(st.integers(0, 2))]:
        more, taken = draw(st.integers(1, 3)), {each.dim for each, _ in cut.along(0) if not each.keeps}
        if dim in taken or cut.local[dim] < more or draw(st.booleans()):
            inner = Cut.whole(cut.local, more)
        else:
            inner = Cut.padded(cut.local, dim, more)
        cut, ways = cut.then(inner), ways * more
    assert cut.ways == ways
    return cut, ways


@st.composite
def single(draw: st.DrawFn) -> tuple[Cut, int]:
    ways = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    kind = draw(st.sampled_from(["whole", "even", "padded", "packed"])) if shape else "whole"
    if kind == "whole":
        return Cut.whole(shape, ways), ways
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "even":
        shape[dim] *= ways
        return Cut.even(shape, dim, ways), ways
    if kind == "padded":
        shape[dim] += ways
        return Cut.padded(shape, dim, ways), ways
    sections = []
    for _ in range(draw(st.integers(1, 3))):
        units = draw(st.sampled_from([u for u in (1, 2, 3, 4, 6, 8) if u % ways == 0 or ways % u == 0]))
        sections.append((units * draw(st.integers(1, 3)), units))
    shape[dim] = sum(size for size, _ in sections)
    return Cut.packed(shape, dim, ways, sections), ways


def put(runs: StridedRange, part: torch.Tensor, base: int, whole: torch.Tensor, counts: torch.Tensor) -> None:
    for i, values in enumerate(runs.of(part, base)):
        at = runs.whole + i * runs.whole_step
        whole[at : at + runs.size] = values
        counts[at : at + runs.size] += 1


@examples(200)
@given(cuts(), st.integers(1, 4), st.booleans(), st.integers(1, 7))
def test_what_all_ranks_hold_is_the_whole(made: tuple[Cut, int], shards: int, owned: bool, most: int) -> None:
    cut, ways = made
    size = math.prod(cut.shape)
    original = torch.arange(1, size + 1).view(cut.shape)
    whole, counts = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    for rank in range(ways):
        local = cut.split(original, rank).reshape(-1)
        bounds = [i * local.numel() // shards for i in range(shards + 1)]
        for start, stop in itertools.pairwise(bounds):
            own = torch.cat([torch.full((3,), -1), local[start:stop]])[3:]  # as if in the middle of a shard
            for runs in strided_ranges(cut, rank, start, stop, owned):
                for block in runs.blocks(most):
                    assert block.elements <= most
                    put(block, own, start, whole, counts)
    assert torch.equal(whole.view(cut.shape), original)
    assert (counts == 1).all() or not owned
    assert (counts >= 1).all()


@examples(200)
@given(cuts())
def test_split_then_join_is_the_identity(made: tuple[Cut, int]) -> None:
    cut, ways = made
    whole = torch.arange(1, math.prod(cut.shape) + 1).view(cut.shape)
    parts = [cut.split(whole, rank) for rank in range(ways)]
    assert all(part.shape == cut.local and part.is_contiguous() for part in parts)
    assert torch.equal(cut.join(parts), whole)
    assert not cut.is_whole or all(torch.equal(part, whole) for part in parts)


def test_experts_are_divided_by_two_axes() -> None:
    """Four experts over two ranks, and the rows of each over two others."""
    cut = Cut.even((4, 6, 2), 0, 2).then(Cut.even((2, 6, 2), 1, 2))
    assert (cut.ways, cut.local) == (4, (2, 3, 2))
    assert [place for _, place in cut.along(3)] == [1, 1]
    whole = torch.arange(48).view(4, 6, 2)
    assert torch.equal(cut.split(whole, 2), whole[2:, :3])
    assert strided_ranges(cut, 1, 0, 12) == [StridedRange(0, 6, 6, 2, 6, 12)]
    with pytest.raises(ValueError, match=r"a cut of \(2, 6, 2\) along 0 divides no \(2, 6, 2\) once more"):
        Cut.even((4, 6, 2), 0, 2).then(Cut.even((2, 6, 2), 0, 2))


def test_a_tensor_that_is_not_cut_is_one_run() -> None:
    assert strided_ranges(Cut.whole((6, 5), 2), 1, 7, 22) == [StridedRange(7, 7, 15)]
    assert strided_ranges(Cut.even((6, 5), 0, 2), 1, 0, 15) == [StridedRange(0, 15, 15)]
    assert strided_ranges(Cut.whole((6, 5), 2), 1, 7, 22, owned=True) == []


def test_rows_of_a_tensor_cut_along_its_last_dim_are_equal_runs() -> None:
    assert strided_ranges(Cut.even((4, 6), 1, 2), 1, 0, 12) == [StridedRange(0, 3, 3, 4, 3, 6)]
    assert strided_ranges(Cut.even((4, 6), 1, 2), 1, 2, 8) == [
        StridedRange(2, 5, 1),
        StridedRange(3, 9, 3),
        StridedRange(6, 15, 2),
    ]
