"""The sharded state: all numbers that this rank holds of the model and its optimizer, as regions of the
model's own tensors. Checkpoints are made of it.

Invariant: with `saved`, every number of every tensor is in exactly one owned run of one rank; with `masters`,
`states` and `frozen`, in each rank that computes with it. Communication: none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import CheckpointError
from polyreme.layout.bucket_layout import Cut, Range, Slot
from polyreme.layout.intervals import overlap
from polyreme.layout.region import MASTER, MODEL, Region, Stored, slice_of
from polyreme.placement.placement import Placement
from polyreme.zero.bucket import Bucket
from polyreme.zero.bucket_optimizer import BucketOptimizer


def saved(placement: Placement, optimizers: Iterable[BucketOptimizer]) -> Iterator[Region]:
    """Yield this rank's share of everything: its shards of weights, of master weights in another dtype, and
    of states."""
    mine = {bucket for number, bucket in enumerate(placement.buckets) if _saves(placement, bucket, number)}
    for bucket in placement.buckets:
        if bucket in mine:
            yield from _flat(placement, bucket, MODEL, bucket.shard, bucket.own)
    for optimizer in optimizers:
        if optimizer.bucket in mine:
            if optimizer.bucket.formats.master != optimizer.bucket.formats.compute:
                yield from _masters(placement, optimizer, optimizer.bucket.own)
            yield from _states(placement, optimizer, optimizer.bucket.own)


def _saves(placement: Placement, bucket: Bucket, number: int) -> bool:
    """Return whether this rank saves its shard of bucket `number`: the first of the pipeline stages that
    share it does, and replicas take turns."""
    replicas = bucket.axis.replicas
    turn = replicas is None or number % replicas.size == replicas.rank
    return turn and placement.division.ranks_of(bucket.stages)[0] == placement.division.pp.rank


def masters(placement: Placement, optimizer: BucketOptimizer) -> Iterator[Region]:
    """Yield the master weights that this rank updates in a bucket, to be filled and then rounded; within
    `OptimizerState.loading` where they are not in memory."""
    yield from _masters(placement, optimizer, optimizer.bucket.region)


def states(placement: Placement, optimizer: BucketOptimizer) -> Iterator[Region]:
    """Yield the optimizer states that this rank updates in a bucket, but for single numbers, to be filled
    within `OptimizerState.loading`."""
    yield from _states(placement, optimizer, optimizer.bucket.region, numbers=False)


def numbers(optimizer: BucketOptimizer) -> dict[str, dict[str, float]]:
    """Return the single-number states of each parameter whose first element this rank updates, by its first
    name; none of one never updated."""
    found: dict[str, dict[str, float]] = {}
    for interval, state in optimizer.state.by_interval():
        own = {kind: float(number) for kind, value in state.items() if (number := _number(value)) is not None}
        for inside in optimizer.bucket.layout.within(interval.start, interval.stop) if state else ():
            if inside.start == 0:
                found[inside.name] = own
    return found


def frozen(placement: Placement, bucket: Bucket) -> Iterator[Region]:
    """Yield all of a bucket that nothing updates, of kind MASTER, to be filled and then stored."""
    yield from _flat(placement, bucket, MASTER, bucket.rounded(), bucket.region)


def _flat(
    placement: Placement, bucket: Bucket, kind: str, data: Tensor | Stored, elements: slice
) -> Iterator[Region]:
    """Yield the regions of `data`, which has these `elements` of the bucket's flat buffer, and one of each
    empty tensor."""
    named = _named(placement, bucket)
    for inside in (*bucket.layout.within(elements.start, elements.stop), *_empty(bucket)):
        yield _region(
            placement, named, kind, inside, slice_of(data, inside.offset, inside.offset + inside.size)
        )


def _masters(placement: Placement, optimizer: BucketOptimizer, elements: slice) -> Iterator[Region]:
    """Yield the masters of these `elements` of the bucket's flat buffer, and one region of each empty
    tensor."""
    bucket = optimizer.bucket
    named = _named(placement, bucket)
    for interval, data in optimizer.state.masters():
        start, stop = overlap(interval, elements)
        for inside in bucket.layout.within(start, stop):
            at = start - interval.start + inside.offset
            yield _region(placement, named, MASTER, inside, slice_of(data, at, at + inside.size))
    for inside in _empty(bucket):
        yield _region(placement, named, MASTER, inside, torch.empty(0, dtype=bucket.formats.master))


def _empty(bucket: Bucket) -> list[Range]:
    return [Range(slot.name, 0, 0, 0) for slot in bucket.layout.slots if not slot.size]


def _states(
    placement: Placement, optimizer: BucketOptimizer, elements: slice, numbers: bool = True
) -> Iterator[Region]:
    """Yield the optimizer states of these `elements` of the bucket's flat buffer; with `numbers`, single
    numbers too."""
    bucket, division = optimizer.bucket, placement.division
    named = _named(placement, bucket)
    for interval, state in optimizer.state.by_interval():
        start, stop = overlap(interval, elements)
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
                    yield _region(placement, named, kind, inside, slice_of(value, at, at + inside.size))
                else:  # an optimizer of whole tensors has states with shapes of their own
                    whole = Cut.whole(tuple(value.shape), over.size)
                    yield Region(kind, names, whole, over.rank, 0, slice_of(value, 0, value.numel()))
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
        placement.division.parameters[names[0]].cut,
        placement.division.over(names[0]).rank,
        inside.start,
        data,
    )


def _number(value: Any) -> Tensor | None:
    """Return a state that is one number; else None."""
    if isinstance(value, Tensor):
        return value.detach() if value.dim() == 0 else None
    return torch.tensor(value) if isinstance(value, int | float) else None
