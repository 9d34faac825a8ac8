"""Which parameter is in which bucket of which unit.

Invariant: every distinct parameter is in exactly one bucket, under the first of its names. The result depends
on the model's names, shapes and dtypes, the recipe, the division and the settings alone, so that it is the
same on every rank of an axis. No memory, no communication."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from polyreme.config.schema import tiers_of
from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Boundary, BucketLayout, Cut, TensorSpec
from polyreme.layout.region import StridedRange, strided_ranges
from polyreme.optim.groups import Recipe
from polyreme.placement.blocks import Entry, Names, entries, units
from polyreme.placement.dividing import Division
from polyreme.placement.settings import PlacementSettings
from polyreme.zero.bucket_spec import BucketSpec, Offloaded
from polyreme.zero.formats import Formats
from polyreme.zero.residency import Residency

Owned = Literal["all", "some", "none"]
"""How much of its part of a parameter a tensor-parallel rank has that no rank before it has."""


class _Kind(NamedTuple):
    """What the parameters of one bucket have in common."""

    axis: Axis
    trainable: bool
    dtype: torch.dtype
    boundary: Boundary
    before_blocks: bool  # those of the root are used either at the beginning of forward or at its end
    stages: tuple[int, ...]
    over: tuple[str, ...]
    owned: tuple[Owned, ...]  # one of each rank of `over`, so that buckets are the same on all of them
    whole: bool  # at stage 3, between steps, too


def specify(
    model: nn.Module,
    blocks: Iterable[str],
    recipe: Recipe,
    settings: PlacementSettings,
    axis: Axis,
    division: Division,
) -> dict[Names, list[BucketSpec]]:
    """The buckets of each unit of `model`, by the names of its blocks; the first is the root, of none.

    blocks: those that are gathered for each use. axis: the ranks that share buckets. `division` tells what
    the parameters are parts of. A pipeline stage may have none, or none to train. Raises ModelError for
    trainable parameters that are not real floating-point numbers, and for an optimizer that needs whole
    tensors of which ranks have parts."""
    found = entries(model)
    persistent = {entry.name for entry in found if _is_whole(entry, settings, division)}
    members = units(
        found,
        blocks,
        persistent,  # they are reduced together
        {entry.name: division.shardings[entry.name].stages for entry in found},
        settings.formats.compute,
        settings.zero.min_bucket,
    )
    first_block = min((entry.at for names, mine in members.items() if names for entry in mine), default=0)
    kinds: dict[Names, list[tuple[_Kind, list[Entry]]]] = {}
    for names, mine in members.items():
        of_kind: dict[_Kind, list[Entry]] = defaultdict(list)
        for entry in mine:
            before, whole = entry.at < first_block, entry.name in persistent
            of_kind[_kind(entry, recipe, settings, axis, division, before, whole)].append(entry)
        kinds[names] = [
            (kind, part)
            for kind, each in of_kind.items()
            for part in _by_size(each, kind.dtype, settings.zero.bucket_size)
        ]
    specs = {
        names: [_spec(kind, part, recipe, settings, division) for kind, part in each]
        for names, each in kinds.items()
    }
    return _offloaded(specs, settings)


def _kind(
    entry: Entry,
    recipe: Recipe,
    settings: PlacementSettings,
    axis: Axis,
    division: Division,
    before_blocks: bool,
    whole: bool,
) -> _Kind:
    name, parameter, sharding = entry.name, entry.parameter, division.shardings[entry.name]
    own = name in recipe.own_dtypes or not parameter.is_floating_point()
    dtype = parameter.dtype if own else settings.formats.compute
    boundary = recipe.boundary(recipe.group_of[name])
    if boundary == "tensor" and not sharding.cut.is_whole:
        raise ModelError(f"the optimizer of {name} needs whole tensors, "
                         "and tensor parallelism gives each rank a part of it: "
                         "use an elementwise optimizer such as adamw, or write mesh.tp = 1")  # fmt: skip
    owned = tuple(_owned(sharding.cut, rank) for rank in range(division.over(name).size))
    trainable = recipe.trains(name, parameter)
    return _Kind(
        axis, trainable, dtype, boundary, before_blocks, sharding.stages, sharding.over, owned, whole
    )


def _is_whole(entry: Entry, settings: PlacementSettings, division: Division) -> bool:
    """Whether a parameter stays whole at stage 3: by the size that it has over all tensor-parallel ranks."""
    size = math.prod(division.shardings[entry.name].cut.shape)
    return settings.zero.stage == 3 and max(size, 1) <= settings.zero.persistence_threshold


def _owned(cut: Cut, rank: int) -> Owned:
    every = math.prod(cut.local)
    held, owned = (
        sum(part.elements for part in strided_ranges(cut, rank, 0, every, only)) for only in (False, True)
    )
    return "all" if owned == held else "some" if owned else "none"


def _by_size(found: Sequence[Entry], dtype: torch.dtype, limit: int) -> list[list[Entry]]:
    """`found` in order, cut into parts of at most `limit` bytes each (a larger tensor is a part by
    itself)."""
    groups: list[list[Entry]] = []
    size = 0
    for entry in found:
        more = entry.bytes_in(dtype)
        if not groups or size + more > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += more
    return groups


def _spec(
    kind: _Kind, found: Sequence[Entry], recipe: Recipe, settings: PlacementSettings, division: Division
) -> BucketSpec:
    """A bucket of these parameters, all of it on the device."""
    assert settings.zero.stage != "auto"
    tensors = [
        TensorSpec(entry.name, tuple(entry.parameter.shape), recipe.group_of[entry.name]) for entry in found
    ]
    layout = BucketLayout.build(tensors, kind.axis.size, kind.boundary)
    names = {entry.name: entry.names for entry in found}
    quantized = settings.formats.quantized and kind.dtype.is_floating_point
    own = Formats(kind.dtype, kind.dtype, quantized)
    residency = Residency.of_stage(settings.zero.stage)
    if kind.whole:
        residency = replace(residency, params="full")
    if kind.axis.size == 1:  # its shard is the whole
        residency = Residency("full", "full", "shard")
    return BucketSpec(
        layout,
        [names[slot.name] for slot in layout.slots],
        kind.axis,
        residency,
        settings.formats if kind.trainable else own,
        settings.accumulation if kind.trainable else None,
        stages=kind.stages,
        tie=division.ties.get(division.ranks_of(kind.stages)),
        counted=_counted(kind, layout, division),
        persistent=kind.whole,
        at=found[0].at,
    )


def _counted(
    kind: _Kind, layout: BucketLayout, division: Division
) -> bool | Sequence[tuple[int, StridedRange]]:
    """The value of `BucketSpec.counted`: what no rank before this one has of those that it is divided over,
    on the first of the stages that share it, in the first of the copies."""
    rank, replicas = division.dividing[kind.over].rank, kind.axis.replicas
    owned = kind.owned[rank]
    if replicas is not None and replicas.rank > 0:
        return False
    if owned == "none" or (division.pp.size > 1 and division.pp.rank != division.ranks_of(kind.stages)[0]):
        return False
    if owned == "all":
        return True
    return [
        (slot.start, strided)
        for slot in layout.slots
        for strided in strided_ranges(division.shardings[slot.name].cut, rank, 0, slot.size, owned=True)
    ]


def _offloaded(
    specs: Mapping[Names, Sequence[BucketSpec]], settings: PlacementSettings
) -> dict[Names, list[BucketSpec]]:
    """The same, with what of each bucket is in a store as the settings say: of the states a share, of the
    parameters all."""
    states, share = tiers_of(settings.memory.states)
    params, _ = tiers_of(settings.memory.params)
    trained = [spec for each in specs.values() for spec in each if spec.trainable]
    away = {
        spec
        for spec, leaves in zip(trained, _taken((t.layout.size for t in trained), share), strict=True)
        if leaves and states != ["device"]
    }

    def with_stores(spec: BucketSpec) -> BucketSpec:
        found: set[Offloaded] = set()
        if spec in away:
            found.add("states")
            # else several ranks add theirs up at the end of a step
            if settings.gradients_leave and spec.tie is None:
                found.add("gradients")
        residency = spec.residency
        if params != ["device"] and not spec.persistent:
            found.add("params")
            if spec.axis.size == 1:
                residency = replace(residency, params="shard")
        return replace(spec, offloaded=found, residency=residency)

    return {names: [with_stores(spec) for spec in each] for names, each in specs.items()}


def _taken(sizes: Iterable[int], share: float) -> Iterator[bool]:
    """Of buckets of these sizes, which ones to take for `share` of all elements, as near as whole buckets
    come to it."""
    seen = taken = 0
    for size in sizes:
        seen += size
        takes = taken + size / 2 <= share * seen
        taken += size * takes
        yield takes
