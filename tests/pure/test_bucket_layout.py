"""Every number of every tensor has exactly one place, in exactly one shard, whatever the shapes and the world
size."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.layout.bucket_layout import ALIGN, Boundary, BucketLayout, Range, TensorSpec, align

SHAPES = st.lists(
    st.lists(st.integers(0, 17), max_size=3).map(tuple) | st.tuples(st.integers(0, 3000)), max_size=12
)
WORLDS = st.integers(1, 64)
BOUNDARIES = st.sampled_from(["element", "tensor"])


@st.composite
def layouts(
    draw: st.DrawFn, boundaries: st.SearchStrategy[Boundary] = BOUNDARIES
) -> tuple[list[TensorSpec], BucketLayout]:  # type: ignore[assignment]
    shapes = draw(SHAPES)
    groups = draw(st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    specs = [
        TensorSpec(f"t{i}", shape, group) for i, (shape, group) in enumerate(zip(shapes, groups, strict=True))
    ]
    return specs, BucketLayout.build(specs, draw(WORLDS), draw(boundaries))


@given(layouts())
@examples(150)
def test_tensors_and_padding_partition_the_buffer(case: tuple[list[TensorSpec], BucketLayout]) -> None:
    specs, layout = case
    assert sorted((s.name, s.shape, s.group) for s in layout.slots) == sorted(
        (s.name, s.shape, s.group) for s in specs
    )
    parts = sorted([(s.start, s.stop) for s in layout.slots if s.size] + layout.gaps())
    assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])][: len(parts)]
    assert (parts[-1][1] if parts else 0) == layout.size
    assert layout.used == sum(s.size for s in specs)
    assert all(s.start % ALIGN == 0 for s in layout.slots) and layout.shard_size % ALIGN == 0


@given(layouts())
@examples(150)
def test_shards_partition_every_tensor(case: tuple[list[TensorSpec], BucketLayout]) -> None:
    specs, layout = case
    edges = [r * layout.shard_size for r in range(layout.world + 1)]
    assert [layout.shard(r) for r in range(layout.world)] == list(pairwise(edges))
    assert layout.size == layout.world * layout.shard_size
    held: dict[str, list[Range]] = {spec.name: [] for spec in specs}
    slots = {slot.name: slot for slot in layout.slots}
    for rank in range(layout.world):
        for piece in layout.ranges(rank):
            held[piece.name].append(piece)
            assert piece.offset >= 0 and piece.offset + piece.stop - piece.start <= layout.shard_size
            assert rank * layout.shard_size + piece.offset == slots[piece.name].start + piece.start
    for spec in specs:
        edges = [0, *(piece.stop for piece in held[spec.name])]
        assert [piece.start for piece in held[spec.name]] == edges[:-1] and edges[-1] == spec.size
        if layout.boundary == "tensor":
            assert len(held[spec.name]) == bool(spec.size), "whole in one shard"


@given(layouts())
@examples(150)
def test_runs_cover_their_shards(case: tuple[list[TensorSpec], BucketLayout]) -> None:
    """Over one shard or all: every element of a tensor in one run of its group, cut at multiples of ALIGN
    alone."""
    _, layout = case
    for start, stop in [(0, layout.size), *(layout.shard(rank) for rank in range(layout.world))]:
        runs = layout.group_intervals(start, stop)
        assert all(start <= run.start < run.stop <= stop for run in runs)
        assert all(a.stop <= b.start for a, b in pairwise(runs))
        covered = 0
        for slot in layout.slots:
            low, high = max(slot.start, start), min(slot.stop, stop)
            if low < high:
                mine = [run for run in runs if run.start < high and low < run.stop]
                assert (
                    len(mine) == 1
                    and mine[0].start <= low
                    and high <= mine[0].stop
                    and mine[0].group == slot.group
                )
                covered += high - low
        if layout.boundary == "element":
            assert all(run.start % ALIGN == 0 and run.stop % ALIGN == 0 and run.slot is None for run in runs)
            assert all(a.group != b.group or a.stop < b.start for a, b in pairwise(runs)), "as few as can be"
        else:
            assert all(
                run.slot is not None and (run.start, run.stop) == (run.slot.start, run.slot.stop)
                for run in runs
            )
        assert covered == sum(r.stop - r.start for rank in range(layout.world) for r in layout.ranges(rank)
                              if start <= rank * layout.shard_size < stop)  # fmt: skip


@given(layouts())
@examples(150)
def test_padding_and_balance_are_bounded(case: tuple[list[TensorSpec], BucketLayout]) -> None:
    specs, layout = case
    sizes = [align(spec.size) for spec in specs]
    if layout.boundary == "element":
        assert layout.size - sum(sizes) < ALIGN * layout.world
    else:
        assert layout.shard_size <= sum(sizes) / layout.world + max(sizes, default=0)


@given(SHAPES, WORLDS, BOUNDARIES)
@examples(50)
def test_groups_lie_together_in_the_order_given(
    shapes: list[tuple[int, ...]], world: int, boundary: Boundary
) -> None:
    specs = [TensorSpec(f"t{i}", shape, i % 2) for i, shape in enumerate(shapes)]
    layout = BucketLayout.build(specs, world, boundary)
    assert layout == BucketLayout.build(specs, world, boundary)
    if boundary == "element":
        assert [slot.name for slot in layout.slots] == [s.name for s in specs if s.group == 0] + [
            s.name for s in specs if s.group == 1
        ]


def test_an_example() -> None:
    specs = [TensorSpec("scalar", ()), TensorSpec("none", (3, 0)), TensorSpec("matrix", (10, 13))]
    layout = BucketLayout.build(specs, 2)
    assert [(slot.name, slot.start, slot.stop) for slot in layout.slots] == [
        ("scalar", 0, 1),
        ("none", 64, 64),
        ("matrix", 64, 194),
    ]
    assert (layout.shard_size, layout.size, layout.used) == (128, 256, 131)
    assert layout.ranges(0) == [Range("scalar", 0, 1, 0), Range("matrix", 0, 64, 64)]
    assert layout.ranges(1) == [Range("matrix", 64, 130, 0)]
    assert layout.gaps() == [(1, 64), (194, 256)]
