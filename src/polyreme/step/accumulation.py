"""Room to add up several micro-batches in a step, made only when a loop asks for it.

Invariant: an engine of one micro-batch a step keeps no room for sums; once `make_room` has given it that, it
is as if made for several. Communication: none."""

from __future__ import annotations

import torch

from polyreme.errors import BatchError
from polyreme.offload.gradients import OffloadedGradients
from polyreme.placement.placement import Placement
from polyreme.step.training_settings import TrainingSettings
from polyreme.zero.bucket import Bucket
from polyreme.zero.gradient_sums import ReducedSum, WholeSum


def has_room(placement: Placement) -> bool:
    """Return whether several micro-batches can be added up."""
    return all(bucket.gradients.sums.several for bucket in placement.trainable)


def make_room(placement: Placement, settings: TrainingSettings) -> None:
    """Make room to add up several micro-batches from the coming step on. Raises BatchError where gradients
    are in files, which have space for one."""
    if has_room(placement):
        return
    _refuse_files(
        placement,
        "set_boundary(False) with gradients in files (memory.gradients), which were laid out for one "
        f"micro-batch a step by batch.size = {settings.batches.now.size}: write a larger batch.size, a "
        'smaller batch.micro, or memory.gradients = "host"',
    )
    several = settings.several
    for bucket in placement.trainable:
        store = _store(bucket, placement, several.reduce, several.how == "stored")
        bucket.gradients.make_room(several.of(bucket.residency, bucket.axis, store))


def keep_adding(placement: Placement, settings: TrainingSettings) -> None:
    """Make it possible to add gradients to those of a step that are reduced already. Raises BatchError where
    they are in files."""
    _refuse_files(
        placement,
        "a backward after the last one of a step, whose gradients are in files (memory.gradients): call "
        'step() or zero_grad() before it, or write memory.gradients = "host"',
    )
    reduce, each = settings.several.reduce, settings.reduces_each
    for bucket in placement.trainable:
        sums = bucket.gradients.sums
        if isinstance(sums, WholeSum):
            sums = ReducedSum(reduce, reduce, _store(bucket, placement, reduce), reduces_each=each)
        bucket.gradients.keep_adding(sums)


def _refuse_files(placement: Placement, why: str) -> None:
    gradients = placement.offload.gradients
    if gradients is not None and not gradients.in_memory:
        raise BatchError(why)


def _store(
    bucket: Bucket, placement: Placement, dtype: torch.dtype, adds: bool = False
) -> OffloadedGradients | None:
    """Reserve another store for the reduced gradients of a bucket, if it has one now."""
    states = bucket.offloaded_states
    if bucket.gradients.sums.store is None or states is None:
        return None
    return placement.offload.gradients_of(states, bucket.region, dtype, adds)
