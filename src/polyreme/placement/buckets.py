"""The assignment of parameters to buckets, by unit.

Invariant: every distinct parameter is in exactly one bucket, under the first of its names. The result depends
only on the model's names, shapes and dtypes, the recipe, the division and the settings, so that it is the
same on every rank of an axis. No memory, no communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from polyreme.config.schema import tiers_of
from polyreme.distributed.mesh import Axis
from polyreme.layout.bucket_layout import BucketLayout, TensorSpec
from polyreme.layout.region import StridedRange, strided_ranges
from polyreme.optim.groups import Recipe
from polyreme.placement.blocks import units
from polyreme.placement.dividing import Division
from polyreme.placement.parameters import ParameterEntry, ParameterNames, entries
from polyreme.placement.settings import PlacementSettings
from polyreme.zero.bucket_spec import BucketSpec, Formats, Offloaded
from polyreme.zero.residency import Residency


def bucket_specs(
    model: nn.Module,
    blocks: Iterable[str],
    recipe: Recipe,
    settings: PlacementSettings,
    axis: Axis,
    division: Division,
) -> Mapping[ParameterNames, list[BucketSpec]]:
    """Return the buckets of each unit of `model`, by the names of its blocks; the first unit is the root,
    without blocks.

    blocks: those gathered for each use. axis: the ranks that share buckets. division: which parameters
    this rank has, and which slices of them. A pipeline stage may have no buckets, or none to train. Raises as
    `entries`."""
    found = entries(model, recipe, settings, division)
    members = units(found, blocks, settings.formats.compute, settings.zero.min_bucket)
    first_block = min((entry.at for names, mine in members.items() if names for entry in mine), default=0)
    specs: dict[ParameterNames, list[BucketSpec]] = {}
    for names, mine in members.items():
        of_kind: dict[object, list[ParameterEntry]] = defaultdict(list)
        for entry in mine:
            # parameters of the root are used either at the beginning of forward or at its end
            of_kind[entry.kind, entry.at < first_block].append(entry)
        specs[names] = [
            _spec(chunk, settings, axis, division)
            for each in of_kind.values()
            for chunk in _by_size(each, settings.zero.bucket_size)
        ]
    return _with_states_off(specs, settings)


def _by_size(found: Sequence[ParameterEntry], limit: int) -> list[list[ParameterEntry]]:
    """Cut `found`, in order, into chunks of at most `limit` bytes each. A larger tensor is a chunk by
    itself."""
    chunks: list[list[ParameterEntry]] = []
    size = 0
    for entry in found:
        more = entry.bytes_in(entry.dtype)
        if not chunks or size + more > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(entry)
        size += more
    return chunks


def _spec(
    found: Sequence[ParameterEntry], settings: PlacementSettings, axis: Axis, division: Division
) -> BucketSpec:
    """Return a bucket of these parameters, which are of one kind, with its states on the device."""
    assert settings.zero.stage != "auto"
    kind, names = found[0], {entry.name: entry.names for entry in found}
    tensors = [TensorSpec(each.name, tuple(each.parameter.shape), each.group) for each in found]
    layout = BucketLayout.build(tensors, axis.size, kind.boundary)
    residency = Residency.of_stage(settings.zero.stage)
    offloaded: set[Offloaded] = set()
    if kind.persistent:
        residency = replace(residency, params="full")
    elif tiers_of(settings.memory.params)[0] != ["device"]:
        offloaded = {"params"}
    if axis.size == 1:  # one rank holds everything
        residency = Residency("shard" if offloaded else "full", "full", "shard")
    return BucketSpec(
        layout,
        [names[slot.name] for slot in layout.slots],
        axis,
        residency,
        settings.formats
        if kind.trainable
        else Formats(kind.dtype, kind.dtype, settings.formats.quantized and kind.dtype.is_floating_point),
        settings.accumulation if kind.trainable else None,
        offloaded,
        stages=kind.division.stages,
        tie=division.ties.get(division.ranks_of(kind.division.stages)),
        counted=_counted(kind, layout, axis, division),
        at=kind.at,
    )


def _counted(
    kind: ParameterEntry, layout: BucketLayout, axis: Axis, division: Division
) -> bool | Sequence[tuple[int, StridedRange]]:
    """Return the value of `BucketSpec.counted`: the numbers that no earlier rank of the parameter's division
    has, on the first of the stages that share it, in the first copy."""
    rank, first = division.over(kind.name).rank, division.ranks_of(kind.division.stages)[0]
    owned = kind.owned[rank]
    if axis.replicas is not None and axis.replicas.rank > 0:
        return False
    if owned == "none" or (division.pp.size > 1 and division.pp.rank != first):
        return False
    if owned == "all":
        return True
    return [
        (slot.start, strided)
        for slot in layout.slots
        for strided in strided_ranges(division.parameters[slot.name].cut, rank, 0, slot.size, owned=True)
    ]


def _with_states_off(
    specs: Mapping[ParameterNames, list[BucketSpec]], settings: PlacementSettings
) -> Mapping[ParameterNames, list[BucketSpec]]:
    """Return the buckets with the states of some of them in a store, as the settings say, and their gradients
    too."""
    where, share = tiers_of(settings.memory.states)
    if where == ["device"]:
        return specs
    trained = [spec for each in specs.values() for spec in each if spec.trainable]
    taken = _taken((spec.layout.size for spec in trained), share)
    away = {spec for spec, takes in zip(trained, taken, strict=True) if takes}

    def moved(spec: BucketSpec) -> BucketSpec:
        # several ranks add up the gradients of a tie at the end of a step
        also: set[Offloaded] = {"gradients"} if settings.gradients_leave and spec.tie is None else set()
        return replace(spec, offloaded={*spec.offloaded, "states", *also})

    return {names: [moved(spec) if spec in away else spec for spec in each] for names, each in specs.items()}


def _taken(sizes: Iterable[int], share: float) -> Iterator[bool]:
    """Choose buckets of these sizes so that they have `share` of all elements, as nearly as whole buckets
    allow."""
    seen = taken = 0
    for size in sizes:
        seen += size
        takes = taken + size / 2 <= share * seen
        taken += size * takes
        yield takes
