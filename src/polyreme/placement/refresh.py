"""Carries what the buckets of one placement hold over to those of another, of the same model after it was
changed: weights and states.

Invariant: a parameter of both placements keeps its master weights to the last bit, and, where both train it,
its states; of one that only the new placement has, nothing changes. Communication: one bucket at a time is
whole on every rank of its axis."""

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
from polyreme.zero.sharded_optimizer import Update


def refuse_own_shapes(updates: Sequence[Update]) -> None:
    """Raise ModelError for an optimizer whose states cannot be carried over: of other shapes than their
    parameters."""
    for update in updates:
        for slot in update.bucket.layout.slots:
            for kind, shape in update.state.shapes(slot).items():
                if shape not in (None, slot.shape):
                    raise ModelError(f"the optimizer's state {kind!r} of {slot.name} has "
                                     "a shape of its own, so it cannot be carried over "
                                     "to a changed model: save the "
                                     "weights, and initialize a new engine")  # fmt: skip


@torch.no_grad()
def carry(
    old: Placement,
    updates: Sequence[Update],
    new: Placement,
    new_updates: Sequence[Update],
    unchanged: Collection[int],
) -> None:
    """Give the buckets of `new` what those of `old` have of the parameters whose ids are in `unchanged`. All
    ranks must call."""
    pairs = [
        (id(p), slot.name)
        for bucket in new.buckets
        for p, slot in zip(bucket.parameters, bucket.layout.slots, strict=True)
    ]
    name_of = {parameter: name for parameter, name in pairs if parameter in unchanged}
    known = _scalars(old, updates, name_of)
    of_bucket = {update.bucket: update for update in updates}
    with ExitStack() as stack:
        by_name: dict[tuple[str, str], list[Region]] = defaultdict(list)
        for update in new_updates:
            stack.enter_context(
                update.state.loading({slot.name: known.get(slot.name) for slot in update.bucket.layout.slots})
            )
            for region in (*masters(new, update), *states(new, update)):
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
    """Copy to each region its part of a flat parameter, which `parameter` begins with."""
    for region in regions:
        assert isinstance(region.data, Tensor)
        region.data.copy_(parameter[region.start :][: region.data.numel()])


def _scalars(
    old: Placement, updates: Sequence[Update], name_of: Mapping[int, str]
) -> dict[str, dict[str, float]]:
    """The states of a parameter that are one number, by name in the new placement, as the ranks together know
    them."""
    found: dict[str, dict[str, float]] = {}
    for update in updates:
        parts: list[Any] = update.bucket.axis.gather_objects(numbers(old, update))
        merged: dict[str, dict[str, float]] = {name: own for part in parts for name, own in part.items()}
        for parameter, slot in zip(update.bucket.parameters, update.bucket.layout.slots, strict=True):
            if slot.name in merged and id(parameter) in name_of:
                found[name_of[id(parameter)]] = merged[slot.name]
    return found


def _whole(bucket: Bucket, update: Update | None) -> Iterator[tuple[str, Tensor]]:
    """The master weights of a bucket, and each of the states that have a number for every element, whole."""
    yield MASTER, bucket.whole(master=True)
    kinds = (
        {}
        if update is None
        else {k: v for slot in bucket.layout.slots for k, v in update.state.shapes(slot).items()}
    )
    for kind in sorted(kind for kind, shape in kinds.items() if shape is not None):
        assert update is not None
        part = torch.zeros(
            bucket.region.stop - bucket.region.start, dtype=bucket.formats.master, device=bucket.device
        )
        for interval, state in update.state.by_interval():
            if (value := state.get(kind)) is not None:
                part[interval.start - bucket.region.start : interval.stop - bucket.region.start] = fetched(
                    value
                )
        yield kind, bucket.axis.gathered(part, bucket.layout.size)
