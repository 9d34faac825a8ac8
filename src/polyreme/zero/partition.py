"""Partitioning a model into buckets: which parameter goes into which bucket of which unit.

Invariant: every distinct parameter is in exactly one bucket, under the first of its names; the result depends
on the model and the config alone, so that it is the same on every rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from polyreme.config.schema import ZeroSection
from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Boundary, BucketLayout, Cut, Slot, TensorSpec
from polyreme.layout.region import strided_ranges
from polyreme.models.tensor_access import entries
from polyreme.offload.optimizer_states import OffloadedStates
from polyreme.offload.parameters import OffloadedShard
from polyreme.optim.groups import Recipe
from polyreme.zero.bucket import Bucket, BucketStores, region_of
from polyreme.zero.bucket_gradients import Microbatches
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.divided import share_of, taken
from polyreme.zero.formats import Formats
from polyreme.zero.gather import Unit
from polyreme.zero.offload_tiers import OffloadTiers
from polyreme.zero.released import Released, unguard
from polyreme.zero.residency import Residency


@dataclass(eq=False)
class _Entry:
    """A distinct parameter: its names, and where it comes in the order of registration."""

    names: list[str]
    parameter: nn.Parameter
    at: int

    def bytes_in(self, dtype: torch.dtype) -> int:
        return self.parameter.numel() * dtype.itemsize


@dataclass(frozen=True)
class Sharding:
    """What this rank has of a parameter: its cut over the ranks of axes `over`, in their order; and the
    pipeline stages that have it."""

    cut: Cut
    stages: tuple[int, ...] = (0,)
    over: tuple[str, ...] = ("tp",)


@dataclass(frozen=True)
class Division:
    """How the model is divided before ZeRO divides what each rank has.

    shardings: every parameter's, by each of its names. dividing: the axes that divide parameters, by what
    `Sharding.over` says. rank_of: of each pipeline stage. ties: the axes over
    ranks whose stages share parameters, by those ranks. computing: the stages whose forward uses a tensor, by
    each of its names."""

    shardings: Mapping[str, Sharding]
    dividing: Mapping[tuple[str, ...], Axis]
    pp: Axis
    rank_of: Sequence[int] = (0,)
    ties: Mapping[tuple[int, ...], Axis] = field(default_factory=dict)
    computing: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def computes(self, name: str) -> bool:
        """Whether a buffer of this rank is the one that counts: its stage's forward changes it, or nothing
        says whose does."""
        stages = self.computing.get(name, ())
        return not stages or self.pp.rank in self.ranks_of(stages)

    @property
    def tp(self) -> Axis:
        """The ranks of tensor parallelism."""
        return self.dividing["tp",]

    def over(self, name: str) -> Axis:
        """The ranks that a parameter is divided over."""
        return self.dividing[self.shardings[name].over]

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        return self.shardings[name].cut.split(whole, self.over(name).rank)

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The ranks of the pipeline that have these stages."""
        return tuple(sorted({self.rank_of[stage] for stage in stages}))


@dataclass
class Placement:
    """All units and buckets of this rank's part of a model. `trainable` is in registration order; `where`
    finds a parameter by any of its names."""

    root: Unit
    units: list[Unit]
    trainable: list[Bucket]
    where: Mapping[str, tuple[Bucket, Slot]]
    pool: Pool
    division: Division
    device: torch.device
    offload: OffloadTiers
    microbatches: Microbatches

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for unit in (self.root, *self.units) for bucket in unit.buckets]

    @property
    def unchanged(self) -> set[int]:
        """Ids of the parameters that have the shape that they were placed with."""
        pairs = (
            (p, slot)
            for bucket in self.buckets
            for p, slot in zip(bucket.parameters, bucket.layout.slots, strict=True)
        )
        return {id(parameter) for parameter, slot in pairs if tuple(parameter.shape) == slot.shape}

    def publish(self) -> None:
        """Give all ranks what changed of the parameters of this one."""
        for work in [bucket.publish() for bucket in self.buckets]:
            work.settle()

    def write(self, name: str, whole: Tensor) -> None:
        """Set a parameter to `whole`, of which this rank keeps its part."""
        bucket, slot = self.where[name]
        bucket.write(slot, self.division.local(name, whole))

    def tensors(
        self, master: bool = False, among: Collection[str] | None = None
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Every parameter of the whole model, whole, with all its names; each valid until the next. All ranks
        must call. among: names; then buckets without any of these are left out."""
        return self._joined(
            self.holding(among),
            lambda b: b.whole(master),
            lambda b: b.formats.master if master else b.formats.compute,
        )

    def holding(self, among: Collection[str] | None) -> list[Bucket]:
        """This rank's buckets that have any of these names, or all."""
        return [
            b
            for b in self.buckets
            if among is None or any(name in among for names, _ in self.named(b) for name in names)
        ]

    def gradients(self) -> Iterator[tuple[list[str], Tensor]]:
        """Every reduced gradient, likewise."""
        return self._joined(
            self.trainable, lambda bucket: bucket.gradients.whole(), lambda bucket: bucket.formats.reduce
        )

    def _joined(
        self,
        buckets: Sequence[Bucket],
        whole: Callable[[Bucket], Tensor],
        dtype_of: Callable[[Bucket], torch.dtype],
    ) -> Iterator[tuple[list[str], Tensor]]:
        """What `whole` gives of each bucket's tensors, in this dtype, from all stages."""
        if self.division.pp.size == 1:
            yield from self._of_stage(buckets, whole)
            return
        mine = [
            (names, list(self.division.shardings[names[0]].cut.shape), str(dtype_of(b)))
            for b in buckets
            for names, _ in self.named(b)
        ]
        yield from self._of_all_stages(mine, self._of_stage(buckets, whole))

    def buffers(self, model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
        """Every persistent buffer of the whole model, by each of its names, of the first stage that uses it.
        All ranks must call."""
        persistent = entries(model).keys()
        found = [
            ([name], buffer)
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name in persistent
        ]
        if self.division.pp.size == 1:
            yield from found
            return
        found = [(names, buffer) for names, buffer in found if self.division.computes(names[0])]
        yield from self._of_all_stages(
            [(names, list(buffer.shape), str(buffer.dtype)) for names, buffer in found], iter(found)
        )

    def _of_all_stages(
        self, mine: list[tuple[list[str], list[int], str]], own: Iterator[tuple[list[str], Tensor]]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """`own`, of which `mine` says names, shapes and dtypes, and what other stages have; each once."""
        pp = self.division.pp
        told: list[Any] = pp.gather_objects(mine)
        known: set[str] = set()
        for rank, theirs in enumerate(told):
            for names, shape, dtype in theirs:
                local = next(own) if rank == pp.rank else None
                if names[0] in known:
                    continue
                known.update(names)
                tensor = (
                    local[1].contiguous()
                    if local
                    else torch.empty(
                        shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self.device
                    )
                )
                pp.broadcast(tensor, rank)
                yield names, tensor

    def _of_stage(
        self, buckets: Sequence[Bucket], whole: Callable[[Bucket], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """The tensors of this rank's stages, joined over tensor parallelism; one bucket in memory at a
        time."""
        for bucket in buckets:
            full = whole(bucket)
            for names, slot in self.named(bucket):
                yield names, self.joined(slot, full[slot.start : slot.stop])

    def joined(self, slot: Slot, local: Tensor) -> Tensor:
        """The whole of a tensor, of which `local`, flat, is this rank's part. All ranks that it is divided
        over must call."""
        over, cut = self.division.over(slot.name), self.division.shardings[slot.name].cut
        if cut.is_whole or over.size == 1:
            return local.view(slot.shape)
        return cut.join([shard.view(slot.shape) for shard in over.gathered(local).chunk(over.size)])

    def named(self, bucket: Bucket) -> list[tuple[list[str], Slot]]:
        """All names of each of the bucket's tensors, in the order of its layout."""
        return [(self._names[bucket, slot.name], slot) for slot in bucket.layout.slots]

    @cached_property
    def _names(self) -> Mapping[tuple[Bucket, str], list[str]]:
        """The parameters' names, by bucket and slot."""
        found: dict[tuple[Bucket, str], list[str]] = defaultdict(list)
        for name, (bucket, slot) in self.where.items():
            found[bucket, slot.name].append(name)
        return found


@dataclass(frozen=True)
class BucketSettings:
    """How buckets are made: over which ranks they are sharded, in which formats, and in which sizes."""

    axis: Axis
    device: torch.device
    residency: Residency
    formats: Formats
    microbatches: Microbatches
    section: ZeroSection

    def residency_of(self, kind: _Kind) -> Residency:
        """What each rank keeps of a bucket of this kind."""
        return replace(self.residency, params="full") if kind.whole else self.residency


def build_placement(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    recipe: Recipe,
    settings: BucketSettings,
    division: Division,
    offload: OffloadTiers,
    carried: Collection[int] = (),
) -> Placement:
    """Move every parameter of `model` into a bucket. A parameter that has data keeps its values (those of the
    axis' rank 0); one on the meta device is replaced by a real one, to be filled by `Placement.write`; one
    whose id is in `carried` will be filled, too. `division` tells what the parameters are parts of. A
    pipeline stage may have none, or none to train. The tiers of `offload` get their extents, and take the
    space.

    Raises ModelError for trainable parameters that are not real floating-point numbers.
    """
    root, *units = members = _members(model, blocks, settings, division)
    first_block = min((entry.at for _, mine in units for entry in mine), default=0)
    bucket_specs = [
        _bucket_spec(unit, kind, group, recipe, settings, division, offload)
        for unit, mine in members
        for kind, entries in _sorted(mine, settings, recipe, first_block, division)
        for group in _by_size(entries, kind.dtype, settings.section.bucket_size)
    ]
    offload.commit()
    pool = Pool(settings.axis, settings.device)
    found: list[tuple[int, Bucket]] = []
    where: dict[str, tuple[Bucket, Slot]] = {}
    for spec in bucket_specs:
        bucket = _fill(model, spec, settings, pool, carried)
        bucket.stages = spec.kind.stages
        bucket.tie = division.ties.get(division.ranks_of(spec.kind.stages))
        bucket.gradients.counted = _counted(bucket, spec.kind, division)
        spec.unit.buckets.append(bucket)
        found.append((spec.at, bucket))
        for entry, slot in zip(spec.entries, spec.layout.slots, strict=True):
            where |= dict.fromkeys(entry.names, (bucket, slot))
    trainable = [bucket for _, bucket in sorted(found, key=lambda pair: pair[0]) if bucket.trainable]
    device, microbatches = settings.device, settings.microbatches
    return Placement(
        root[0], [unit for unit, _ in units], trainable, where, pool, division, device, offload, microbatches
    )


def _members(
    model: nn.Module, blocks: Mapping[str, nn.Module], settings: BucketSettings, division: Division
) -> list[tuple[Unit, list[_Entry]]]:
    """The units, the root first, and the parameters of each, in the order of registration."""
    entries = _entries(model)
    unit_of = _units_of(entries, blocks)
    unit_of |= {
        entry.names[0]: "" for entry in entries if _is_whole(entry, settings, division)
    }  # they are reduced together
    of_block: dict[str, list[_Entry]] = defaultdict(list)
    for entry in entries:
        of_block[unit_of[entry.names[0]]].append(entry)
    stage_of = {
        name: division.shardings[of_block[name][0].names[0]].stages for name in blocks if of_block.get(name)
    }
    least = settings.section.min_bucket
    found = [(Unit("root", [model]), of_block[""])]
    for names in _coalesce(blocks, of_block, stage_of, settings.formats.compute, least):
        mine = sorted((entry for name in names for entry in of_block[name]), key=lambda entry: entry.at)
        found.append((Unit(names[0], [blocks[name] for name in names]), mine))
    return found


def _bucket_spec(
    unit: Unit,
    kind: _Kind,
    entries: Sequence[_Entry],
    recipe: Recipe,
    settings: BucketSettings,
    division: Division,
    offload: OffloadTiers,
) -> _BucketSpec:
    """A bucket of these parameters, with its extents in the stores of `offload`."""
    by_name = {entry.names[0]: entry for entry in entries}
    specs = [
        TensorSpec(name, tuple(entry.parameter.shape), recipe.group_of[name])
        for name, entry in by_name.items()
    ]
    layout = BucketLayout.build(specs, kind.axis.size, kind.boundary)
    states = gradients = shard = None
    if kind.trainable and (store := offload.next(layout.size)) is not None:
        region = region_of(layout, kind.axis, settings.residency_of(kind))
        master = settings.formats.master
        states = OffloadedStates(layout, region, recipe.groups, master, store, offload.compact)
        # else several add theirs up at the end of a step
        if division.ranks_of(kind.stages) not in division.ties:
            reduce = settings.formats.reduce
            gradients = offload.gradients_of(states, region, reduce, settings.microbatches)
    if offload.parameters is not None and not kind.whole:
        shard = OffloadedShard(offload.parameters, layout.shard_size, kind.dtype)
    stores = BucketStores(states, shard, gradients, offload.transfer)
    ordered = [by_name[slot.name] for slot in layout.slots]
    return _BucketSpec(unit, kind, entries[0].at, ordered, layout, stores)


@dataclass
class _BucketSpec:
    """A bucket before it is made. at: where its first parameter comes in the order of registration."""

    unit: Unit
    kind: _Kind
    at: int
    entries: list[_Entry]
    layout: BucketLayout
    stores: BucketStores


Owned = Literal["all", "some", "none"]
"""How much of its part of a parameter a tensor-parallel rank has that no rank before it has."""


class _Kind(NamedTuple):
    """What the parameters of one bucket have in common. axis: the ranks that hold replicas of them, over
    which they are sharded and their gradients are summed."""

    axis: Axis
    trainable: bool
    dtype: torch.dtype
    boundary: Boundary
    before_blocks: bool  # those of the root are used either at the beginning of forward or at its end
    stages: tuple[int, ...]
    over: tuple[str, ...]
    owned: tuple[Owned, ...]  # one of each rank of `over`, so that buckets are the same on all of them
    whole: bool  # at stage 3, between steps, too


def _sorted(
    entries: list[_Entry], settings: BucketSettings, recipe: Recipe, first_block: int, division: Division
) -> Iterable[tuple[_Kind, list[_Entry]]]:
    """`entries` by kind, in order within each."""
    kinds: dict[_Kind, list[_Entry]] = defaultdict(list)
    for entry in entries:
        parameter = entry.parameter
        own = entry.names[0] in recipe.own_dtypes or not parameter.is_floating_point()
        dtype = parameter.dtype if own else settings.formats.compute
        boundary = recipe.boundary(recipe.group_of[entry.names[0]])
        sharding = division.shardings[entry.names[0]]
        if boundary == "tensor" and not sharding.cut.is_whole:
            raise ModelError(f"the optimizer of {entry.names[0]} needs whole tensors, "
                             "and tensor parallelism gives each rank a part of it: "
                             "use an elementwise optimizer such as adamw, or write mesh.tp = 1")  # fmt: skip
        owned = tuple(_owned(sharding.cut, rank) for rank in range(division.over(entry.names[0]).size))
        first = entry.at < first_block
        trainable = recipe.trains(entry.names[0], parameter)
        whole = _is_whole(entry, settings, division)
        kind = _Kind(
            settings.axis, trainable, dtype, boundary, first, sharding.stages, sharding.over, owned, whole
        )
        kinds[kind].append(entry)
    return kinds.items()


def _is_whole(entry: _Entry, settings: BucketSettings, division: Division) -> bool:
    """Whether a parameter stays whole at stage 3: by the size that it has over all tensor-parallel ranks."""
    size = math.prod(division.shardings[entry.names[0]].cut.shape)
    return settings.residency.params == "shard" and max(size, 1) <= settings.section.persistence_threshold


def _owned(cut: Cut, rank: int) -> Owned:
    every = math.prod(cut.local)
    held, owned = (
        sum(part.elements for part in strided_ranges(cut, rank, 0, every, only)) for only in (False, True)
    )
    return "all" if owned == held else "some" if owned else "none"


def _counted(bucket: Bucket, kind: _Kind, division: Division) -> bool | Tensor:
    """The value of `BucketGradients.counted`: what no rank before this one has of those that it is divided
    over, on the first of the stages that share it, in the first of the copies."""
    rank, replicas = division.dividing[kind.over].rank, kind.axis.replicas
    owned = kind.owned[rank]
    if replicas is not None and replicas.rank > 0:
        return False
    if owned == "none" or (division.pp.size > 1 and division.pp.rank != division.ranks_of(kind.stages)[0]):
        return False
    if owned == "all":
        return True
    mask = torch.zeros(bucket.layout.size, dtype=bucket.formats.reduce)
    for slot in bucket.layout.slots:
        for strided in strided_ranges(division.shardings[slot.name].cut, rank, 0, slot.size, owned=True):
            strided.of(mask[slot.start : slot.stop]).fill_(1)
    return mask[bucket.own].to(bucket.device)


def _entries(model: nn.Module) -> list[_Entry]:
    found: dict[int, _Entry] = {}
    for at, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in found:
            found[id(parameter)].names.append(name)
            continue
        found[id(parameter)] = _Entry([name], parameter, at)
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ModelError(
                f"parameter {name} is trainable and {parameter.dtype}; "
                "only real floating-point parameters can be trained"
            )
    return list(found.values())


def _units_of(entries: list[_Entry], blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """The block of each parameter, by its first name; "" is the root's, and that of parameters which several
    blocks share."""

    def block_of(name: str) -> str:
        return next((block for block in blocks if name.startswith(block + ".")), "")

    found = {}
    for entry in entries:
        owners = {block_of(name) for name in entry.names}
        found[entry.names[0]] = owners.pop() if len(owners) == 1 else ""
    return found


def _coalesce(
    blocks: Mapping[str, nn.Module],
    members: Mapping[str, list[_Entry]],
    stage_of: Mapping[str, object],
    dtype: torch.dtype,
    least: int,
) -> list[list[str]]:
    """Names of consecutive blocks of a pipeline stage that form one unit: each has at least `least` bytes,
    but for a stage's last."""
    units: list[list[str]] = []
    size = least
    for name in blocks:
        if not members.get(name):
            continue
        if size >= least or stage_of[name] != stage_of[units[-1][-1]]:
            units.append([])
            size = 0
        units[-1].append(name)
        size += sum(e.bytes_in(dtype) for e in members[name])
    return units


def _by_size(entries: list[_Entry], dtype: torch.dtype, limit: int) -> list[list[_Entry]]:
    """`entries` in order, cut into parts of at most `limit` bytes each (a larger tensor is a part by
    itself)."""
    groups: list[list[_Entry]] = []
    size = 0
    for entry in entries:
        more = entry.bytes_in(dtype)
        if not groups or size + more > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += more
    return groups


def _fill(
    model: nn.Module, spec: _BucketSpec, settings: BucketSettings, pool: Pool, carried: Collection[int]
) -> Bucket:
    """The bucket of `spec`, holding the values of its entries where they have any."""
    kind, device, microbatches = spec.kind, settings.device, settings.microbatches
    quantized = settings.formats.quantized and kind.dtype.is_floating_point
    own = Formats(kind.dtype, kind.dtype, kind.dtype, kind.dtype, quantized)
    formats = settings.formats if kind.trainable else own
    values: list[Callable[[], Tensor] | None] = []
    for entry in spec.entries:
        old = entry.parameter
        divided = share_of(old) is not None
        if isinstance(old, Released):
            unguard([old])
        old.grad = None  # the gradient of before goes
        if old.is_meta or id(old) in carried:
            values.append(None)
        else:
            values.append(partial(taken, old) if divided else partial(_sent, old.data, kind.axis, device))
        if old.is_meta:  # a meta parameter cannot be given data of another device
            entry.parameter = nn.Parameter(
                torch.empty(0, device=device, dtype=formats.compute), old.requires_grad
            )
            entry.parameter.__dict__.update(old.__dict__)
            for name in entry.names:
                owner, _, attribute = name.rpartition(".")
                # recurrent modules follow assignments
                setattr(model.get_submodule(owner), attribute, entry.parameter)
    parameters, residency = [entry.parameter for entry in spec.entries], settings.residency_of(kind)
    trained = microbatches if kind.trainable else None
    bucket = Bucket(spec.layout, parameters, kind.axis, residency, formats, pool, trained, spec.stores)
    for slot, value in zip(spec.layout.slots, values, strict=True):
        if value is not None:
            bucket.write(slot, value())
    bucket.release()
    return bucket


def _sent(numbers: Tensor, axis: Axis, device: torch.device) -> Tensor:
    """What the first rank of an axis has of these numbers."""
    found = numbers.to(device).contiguous()
    axis.broadcast(found)
    return found
