"""The sharded state: all numbers that this rank holds of the model and of its optimizer, as regions of the
model's own tensors: what a checkpoint is made of.

Invariant: with `saved`, every number of every tensor is in exactly one owned run of one rank; with `loaded`,
in each rank that computes with it. Communication: none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import CheckpointError
from polyreme.layout.bucket_layout import Cut, Range, Slot
from polyreme.layout.intervals import overlap
from polyreme.layout.region import MASTER, MODEL, Region, Stored, part_of
from polyreme.placement.placement import Placement
from polyreme.zero.bucket import Bucket
from polyreme.zero.sharded_optimizer import Update


def saved(placement: Placement, updates: Iterable[Update]) -> Iterator[Region]:
    """This rank's share of everything: its shards of weights, of master weights where they are of another
    dtype, and of states."""
    mine = {bucket for number, bucket in enumerate(placement.buckets) if _saves(placement, bucket, number)}
    for bucket in placement.buckets:
        if bucket in mine:
            yield from _flat(placement, bucket, MODEL, bucket.shard, bucket.own)
    for update in updates:
        if update.bucket in mine:
            if update.bucket.formats.master != update.bucket.formats.compute:
                yield from _masters(placement, update, update.bucket.own)
            yield from _states(placement, update, update.bucket.own)


def _saves(placement: Placement, bucket: Bucket, number: int) -> bool:
    """Whether this rank saves its shard of bucket `number`: of pipeline stages that share it the first one
    does, and the copies take turns."""
    replicas = bucket.axis.replicas
    turn = replicas is None or number % replicas.size == replicas.rank
    return turn and placement.division.ranks_of(bucket.stages)[0] == placement.division.pp.rank


def masters(placement: Placement, update: Update) -> Iterator[Region]:
    """The weights of a bucket that this rank updates, of kind MASTER. To be filled, and then rounded; where
    they are not in memory, while `OptimizerState.loading`."""
    yield from _masters(placement, update, update.bucket.region)


def states(placement: Placement, update: Update) -> Iterator[Region]:
    """The optimizer's states of a bucket that this rank updates, but for scalars. To be filled while
    `Update.loading`."""
    yield from _states(placement, update, update.bucket.region, numbers=False)


def numbers(placement: Placement, update: Update) -> dict[str, dict[str, float]]:
    """The states that are one number of each parameter whose first element this rank updates, by its first
    name; none of one never updated."""
    found: dict[str, dict[str, float]] = {}
    for interval, state in update.state.by_interval():
        own = {kind: float(number) for kind, value in state.items() if (number := _number(value)) is not None}
        for inside in update.bucket.layout.within(interval.start, interval.stop) if state else ():
            if inside.start == 0:
                found[inside.name] = own
    return found


def frozen(placement: Placement, bucket: Bucket) -> Iterator[Region]:
    """All of a bucket that nothing updates, of kind MASTER. To be filled, and then stored."""
    yield from _flat(placement, bucket, MASTER, bucket.rounded(), bucket.region)


def _flat(
    placement: Placement, bucket: Bucket, kind: str, data: Tensor | Stored, part: slice
) -> Iterator[Region]:
    """The regions of `data`, which is the part of the bucket's flat buffer; and one of each tensor without
    elements."""
    named = _named(placement, bucket)
    for inside in (*bucket.layout.within(part.start, part.stop), *_empty(bucket)):
        yield _region(
            placement, named, kind, inside, part_of(data, inside.offset, inside.offset + inside.size)
        )


def _masters(placement: Placement, update: Update, part: slice) -> Iterator[Region]:
    """The masters that lie in the part of the bucket's flat buffer; and one of each tensor without
    elements."""
    bucket = update.bucket
    named = _named(placement, bucket)
    for interval, data in update.state.masters():
        start, stop = overlap(interval, part)
        for inside in bucket.layout.within(start, stop):
            at = start - interval.start + inside.offset
            yield _region(placement, named, MASTER, inside, part_of(data, at, at + inside.size))
    for inside in _empty(bucket):
        yield _region(placement, named, MASTER, inside, torch.empty(0, dtype=bucket.formats.master))


def _empty(bucket: Bucket) -> list[Range]:
    return [Range(slot.name, 0, 0, 0) for slot in bucket.layout.slots if not slot.size]


def _states(placement: Placement, update: Update, part: slice, numbers: bool = True) -> Iterator[Region]:
    """The optimizer's states that lie in the part of the bucket's flat buffer; `numbers`: those that are one
    number, too."""
    bucket, division = update.bucket, placement.division
    named = _named(placement, bucket)
    for interval, state in update.state.by_interval():
        start, stop = overlap(interval, part)
        both = ((inside, each) for inside in bucket.layout.within(start, stop) for each in state.items())
        for inside, (kind, value) in both:
            names, slot = named[inside.name]
            over = division.over(names[0])
            if (number := _number(value)) is not None:
                if numbers and inside.start == 0:
                    yield Region(kind, names, Cut.whole((), over.size), over.rank, 0, number.reshape(1))
            elif isinstance(value, Tensor | Stored):
                if value.numel() == interval.size and (interval.slot is None or value.shape == slot.shape):
                    at = start - interval.start + inside.offset
                    yield _region(placement, named, kind, inside, part_of(value, at, at + inside.size))
                else:  # an optimizer of whole tensors has states with shapes of their own
                    whole = Cut.whole(tuple(value.shape), over.size)
                    yield Region(kind, names, whole, over.rank, 0, part_of(value, 0, value.numel()))
            elif value is not None:
                raise CheckpointError(
                    f"the optimizer's state {kind!r} of {names[0]} is a "
                    f"{type(value).__name__}: only tensors and numbers can be saved"
                )


def _named(placement: Placement, bucket: Bucket) -> Mapping[str, tuple[Sequence[str], Slot]]:
    return {slot.name: (names, slot) for names, slot in placement.named(bucket)}


def _region(
    placement: Placement,
    named: Mapping[str, tuple[Sequence[str], Slot]],
    kind: str,
    inside: Range,
    data: Tensor | Stored,
) -> Region:
    names, _ = named[inside.name]
    return Region(
        kind,
        names,
        placement.division.shardings[names[0]].cut,
        placement.division.over(names[0]).rank,
        inside.start,
        data,
    )


def _number(value: Any) -> Tensor | None:
    """A state that is one number for a parameter."""
    if isinstance(value, Tensor):
        return value.detach() if value.dim() == 0 else None
    return torch.tensor(value) if isinstance(value, int | float) else None
