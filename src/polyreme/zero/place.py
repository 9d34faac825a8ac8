"""From a model to its buckets: which parameter goes into which bucket of which unit.

Invariant: every distinct parameter is in exactly one bucket, under the first of its names; the result depends on the model and the
config alone, so that it is the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyreme.config.keys import ZeroSection
from polyreme.errors import ModelError
from polyreme.layout import Boundary, BucketLayout, Slot, TensorSpec
from polyreme.mesh import Axis
from polyreme.zero.blocks import Unit
from polyreme.zero.bucket import Bucket, Formats, Pool
from polyreme.zero.optimizers import Recipe
from polyreme.zero.residency import Residency


@dataclass(eq=False)
class _Entry:
    """A distinct parameter: its names, and where it comes in the order of registration."""

    names: list[str]
    parameter: nn.Parameter
    at: int

    def bytes_in(self, dtype: torch.dtype) -> int:
        return self.parameter.numel() * dtype.itemsize


@dataclass
class Placement:
    """All units and buckets of a model. `trainable` is in registration order; `where` finds a parameter by any of its names."""

    root: Unit
    units: list[Unit]
    trainable: list[Bucket]
    where: Mapping[str, tuple[Bucket, Slot]]
    pool: Pool

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for unit in (self.root, *self.units) for bucket in unit.buckets]

    def tensors(self, master: bool = False) -> Iterator[tuple[list[str], Tensor]]:
        """Every parameter, whole, with all its names; one bucket in memory at a time, valid until the next. All ranks must call."""
        names: dict[tuple[int, str], list[str]] = defaultdict(list)
        for name, (bucket, slot) in self.where.items():
            names[id(bucket), slot.name].append(name)
        for bucket in self.buckets:
            full = bucket.whole(master)
            for slot in bucket.layout.slots:
                yield names[id(bucket), slot.name], full[slot.start : slot.stop].view(slot.shape)


def place(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    recipe: Recipe,
    axis: Axis,
    section: ZeroSection,
    residency: Residency,
    formats: Formats,
    device: torch.device,
    reduces_microbatches: bool,
) -> Placement:
    """Move every parameter of `model` into a bucket. A parameter that has data keeps its values (those of the axis' rank 0); one on
    the meta device is replaced by a real one, to be filled by `Bucket.write`.

    Raises ModelError for a model without parameters, or with trainable parameters that are not real floating-point numbers.
    """
    entries = _entries(model)
    unit_of = _units_of(entries, blocks)
    members: dict[str, list[_Entry]] = defaultdict(list)
    for entry in entries:
        members[unit_of[entry.names[0]]].append(entry)
    root = Unit("root", [model])
    units = [Unit(names[0], [blocks[name] for name in names]) for names in _coalesce(blocks, members, formats.compute, section.min_bucket)]
    first_block = min((e.at for name in blocks for e in members[name]), default=0)
    pool = Pool(axis, device)
    found: list[tuple[int, Bucket]] = []
    where: dict[str, tuple[Bucket, Slot]] = {}
    for unit in (root, *units):
        names = [""] if unit is root else [name for name, block in blocks.items() if any(block is m for m in unit.modules)]
        mine = sorted((e for name in names for e in members[name]), key=lambda e: e.at)
        for kind, entries_of_kind in _sorted(mine, formats, recipe, first_block):
            for part in _split(entries_of_kind, kind.dtype, section.bucket_size):
                specs = [TensorSpec(e.names[0], tuple(e.parameter.shape), recipe.group_of[e.names[0]]) for e in part]
                layout = BucketLayout.build(specs, axis.size, kind.boundary)
                by_name = {e.names[0]: e for e in part}
                ordered = [by_name[slot.name] for slot in layout.slots]
                own = formats if kind.trainable else Formats(kind.dtype, kind.dtype, kind.dtype, kind.dtype)
                bucket = _fill(model, ordered, layout, axis, residency, own, pool, device, kind.trainable, reduces_microbatches)
                unit.buckets.append(bucket)
                found.append((part[0].at, bucket))
                for entry, slot in zip(ordered, layout.slots, strict=True):
                    where |= dict.fromkeys(entry.names, (bucket, slot))
    trainable = [bucket for _, bucket in sorted(found, key=lambda pair: pair[0]) if bucket.trainable]
    if not trainable:
        raise ModelError("every parameter of the model is frozen: set requires_grad on those to train")
    return Placement(root, units, trainable, where, pool)


class _Kind(NamedTuple):
    """What the parameters of one bucket have in common."""

    trainable: bool
    dtype: torch.dtype
    boundary: Boundary
    before_blocks: bool  # those of the root are used either at the beginning of forward or at its end


def _sorted(entries: list[_Entry], formats: Formats, recipe: Recipe, first_block: int) -> Iterable[tuple[_Kind, list[_Entry]]]:
    """`entries` by kind, in order within each."""
    kinds: dict[_Kind, list[_Entry]] = defaultdict(list)
    for entry in entries:
        parameter = entry.parameter
        dtype = formats.compute if parameter.is_floating_point() else parameter.dtype
        boundary = recipe.boundary(recipe.group_of[entry.names[0]])
        kinds[_Kind(parameter.requires_grad, dtype, boundary, entry.at < first_block)].append(entry)
    return kinds.items()


def _entries(model: nn.Module) -> list[_Entry]:
    found: dict[int, _Entry] = {}
    for at, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in found:
            found[id(parameter)].names.append(name)
            continue
        found[id(parameter)] = _Entry([name], parameter, at)
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ModelError(f"parameter {name} is trainable and {parameter.dtype}; only real floating-point parameters can be trained")
    if not found:
        raise ModelError("the model has no parameters: there is nothing to train")
    return list(found.values())


def _units_of(entries: list[_Entry], blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """The block of each parameter, by its first name; "" is the root's, and that of parameters which several blocks share."""

    def block_of(name: str) -> str:
        return next((block for block in blocks if name.startswith(block + ".")), "")

    found = {}
    for entry in entries:
        owners = {block_of(name) for name in entry.names}
        found[entry.names[0]] = owners.pop() if len(owners) == 1 else ""
    return found


def _coalesce(blocks: Mapping[str, nn.Module], members: Mapping[str, list[_Entry]], dtype: torch.dtype, least: int) -> list[list[str]]:
    """Names of consecutive blocks that form one unit: each unit has at least `least` bytes, but for the last."""
    units: list[list[str]] = []
    size = least
    for name in blocks:
        if not members.get(name):
            continue
        if size >= least:
            units.append([])
            size = 0
        units[-1].append(name)
        size += sum(e.bytes_in(dtype) for e in members[name])
    return units


def _split(entries: list[_Entry], dtype: torch.dtype, limit: int) -> list[list[_Entry]]:
    """`entries` in order, cut into parts of at most `limit` bytes each (a larger tensor is a part by itself)."""
    parts: list[list[_Entry]] = []
    size = 0
    for entry in entries:
        more = entry.bytes_in(dtype)
        if not parts or size + more > limit:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += more
    return parts


def _fill(
    model: nn.Module, entries: list[_Entry], layout: BucketLayout, axis: Axis, residency: Residency, formats: Formats,
    pool: Pool, device: torch.device, train: bool, reduces_microbatches: bool,
) -> Bucket:  # fmt: skip
    """The bucket for `entries`, holding their values where they have any."""
    values: list[Tensor | None] = []
    for entry in entries:
        old = entry.parameter
        values.append(None if old.is_meta else old.data.to(device).contiguous())
        if old.is_meta:  # a meta parameter cannot be given data of another device
            entry.parameter = nn.Parameter(torch.empty(0, device=device, dtype=formats.compute), old.requires_grad)
            entry.parameter.__dict__.update(old.__dict__)
            for name in entry.names:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, entry.parameter)  # recurrent modules follow assignments
    bucket = Bucket(layout, [e.parameter for e in entries], axis, residency, formats, pool, device, train, reduces_microbatches)
    for slot, value in zip(layout.slots, values, strict=True):
        if value is not None:
            axis.broadcast(value)
            bucket.write(slot, value)
    bucket.release()
    return bucket
