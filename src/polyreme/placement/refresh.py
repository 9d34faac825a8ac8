"""Transfer of weights and optimizer states from one placement to another one of the same model, after the
model was changed.

Invariant: a parameter of both placements keeps its master weights to the last bit, and its states where both
train it; one that only the new placement has is left as it is. Communication: one bucket at a time is whole
on every rank of its axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import ModelError
from polyreme.layout.region import MASTER, Region, fetched
from polyreme.placement.placement import Placement
from polyreme.placement.sharded_state import frozen, masters, numbers, states
from polyreme.zero.bucket import Bucket
from polyreme.zero.bucket_optimizer import BucketOptimizer


def refuse_own_shapes(optimizers: Sequence[BucketOptimizer]) -> None:
    """Raise ModelError for an optimizer whose states have other shapes than their parameters, and so cannot
    be transferred."""
    for optimizer in optimizers:
        for slot in optimizer.bucket.layout.slots:
            for kind, shape in optimizer.state.shapes(slot).items():
                if shape not in (None, slot.shape):
                    raise ModelError(f"the optimizer's state {kind!r} of {slot.name} has "
                                     "a shape of its own, so it cannot be carried over "
                                     "to a changed model: save the "
                                     "weights, and initialize a new engine")  # fmt: skip


@torch.no_grad()
def transfer_state(
    old: Placement,
    optimizers: Sequence[BucketOptimizer],
    new: Placement,
    new_optimizers: Sequence[BucketOptimizer],
    unchanged: Collection[int],
) -> None:
    """Fill the buckets of `new` from those of `old`, for the parameters whose ids are in `unchanged`. All
    ranks must call."""
    pairs = [
        (id(p), slot.name)
        for bucket in new.buckets
        for p, slot in zip(bucket.parameters, bucket.layout.slots, strict=True)
    ]
    name_of = {parameter: name for parameter, name in pairs if parameter in unchanged}
    known = _scalars(optimizers, name_of)
    of_bucket = {optimizer.bucket: optimizer for optimizer in optimizers}
    with ExitStack() as stack:
        by_name: dict[tuple[str, str], list[Region]] = defaultdict(list)
        for optimizer in new_optimizers:
            stack.enter_context(
                optimizer.state.loading(
                    {slot.name: known.get(slot.name) for slot in optimizer.bucket.layout.slots}
                )
            )
            for region in (*masters(new, optimizer), *states(new, optimizer)):
                by_name[region.names[0], region.kind].append(region)
        for bucket in new.buckets:
            for region in () if bucket.trainable else frozen(new, bucket):
                by_name[region.names[0], region.kind].append(region)
        for bucket in old.buckets:
            for kind, whole in _whole(bucket, of_bucket.get(bucket)):
                for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
                    _fill(by_name.get((name_of.get(id(parameter), ""), kind), ()), whole[slot.start :])
    new.publish()


def _fill(regions: Iterable[Region], parameter: Tensor) -> None:
    """Copy to each region its range of a flat parameter, with which `parameter` begins."""
    for region in regions:
        assert isinstance(region.data, Tensor)
        region.data.copy_(parameter[region.start :][: region.data.numel()])


def _scalars(
    optimizers: Sequence[BucketOptimizer], name_of: Mapping[int, str]
) -> dict[str, dict[str, float]]:
    """Return the single-number states of each parameter, by its name in the new placement, gathered from the
    ranks."""
    found: dict[str, dict[str, float]] = {}
    for optimizer in optimizers:
        gathered: list[Any] = optimizer.bucket.axis.gather_objects(numbers(optimizer))
        merged: dict[str, dict[str, float]] = {name: own for each in gathered for name, own in each.items()}
        for parameter, slot in zip(optimizer.bucket.parameters, optimizer.bucket.layout.slots, strict=True):
            if slot.name in merged and id(parameter) in name_of:
                found[name_of[id(parameter)]] = merged[slot.name]
    return found


def _whole(bucket: Bucket, optimizer: BucketOptimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the master weights of a bucket, and each of its states with a number per element, whole."""
    yield MASTER, bucket.whole(master=True)
    kinds = (
        {}
        if optimizer is None
        else {k: v for slot in bucket.layout.slots for k, v in optimizer.state.shapes(slot).items()}
    )
    for kind in sorted(kind for kind, shape in kinds.items() if shape is not None):
        assert optimizer is not None
        flat = torch.zeros(
            bucket.region.stop - bucket.region.start, dtype=bucket.formats.master, device=bucket.device
        )
        for interval, state in optimizer.state.by_interval():
            if (value := state.get(kind)) is not None:
                flat[interval.start - bucket.region.start : interval.stop - bucket.region.start] = fetched(
                    value
                )
        yield kind, bucket.axis.gathered(flat, bucket.layout.size)
