"""How the micro-batches of a step are added up, which config and ranks decide.

Invariant: an engine of one micro-batch a step keeps no room for sums. `make_room` gives it that when a loop
first asks for several; from then on it is as one that was made for them. Communication: none."""

from __future__ import annotations

from dataclasses import replace

import torch

from polyreme.config import Config
from polyreme.config.schema import is_files, tiers_of
from polyreme.errors import BatchError
from polyreme.offload.gradients import OffloadedGradients
from polyreme.placement.placement import Placement
from polyreme.step.precision import DTYPES
from polyreme.zero.bucket import Bucket
from polyreme.zero.bucket_gradients import Microbatches
from polyreme.zero.reduce import Reducer


def added(config: Config, dp: int) -> Microbatches:
    """How several micro-batches are added up on `dp` data-parallel ranks."""
    if not (dp == 1 or config.zero.reduce_every == "microbatch"):
        return "added"
    host = tiers_of(config.memory.states)[0] != ["device"]
    # then nothing that grows with the model stays on the device
    offloaded = host and tiers_of(config.memory.params)[0] != ["device"]
    if offloaded or is_files(tiers_of(config.memory.gradients)[0]):
        return "left"
    return "reduced" if dp > 1 else "added"


def each_time(config: Config, dp: int, microbatches: Microbatches) -> bool:
    """Whether gradients are reduced after each micro-batch."""
    return microbatches == "left" or (config.zero.reduce_every == "microbatch" and dp > 1)


def reduced_format(config: Config, ranks: int, microbatches: Microbatches) -> torch.dtype:
    """The format of reduced gradients: where nothing is summed, the one that they come in."""
    precision = config.precision
    return DTYPES[precision.compute if ranks == 1 and microbatches == "one" else precision.reduce]


def make_room(placement: Placement, reducer: Reducer, config: Config, dp: int, ranks: int) -> None:
    """Let an engine of one micro-batch a step add several up from the coming step on. Raises BatchError where
    gradients are in files, which have space for one."""
    gradients = placement.offload.gradients
    if gradients is not None and not gradients.in_memory:
        raise BatchError(
            "set_boundary(False) with gradients in files (memory.gradients), which were laid out for one "
            f"micro-batch a step by batch.size = {config.batch.size}: write a larger batch.size, a smaller "
            'batch.micro, or memory.gradients = "host"'
        )
    microbatches = added(config, dp)
    for bucket in placement.trainable:
        store = _fit(bucket, placement, reduced_format(config, ranks, microbatches), microbatches)
        bucket.gradients.make_room(microbatches, bucket.formats, store)
    placement.microbatches = microbatches
    reducer.every_time = each_time(config, dp, microbatches)


def keep_adding(placement: Placement, config: Config) -> None:
    """Let more gradients be added to those of a step that are reduced already. Raises BatchError where they
    are in files."""
    gradients = placement.offload.gradients
    if gradients is not None and not gradients.in_memory:
        raise BatchError(
            "a backward after the last one of a step, whose gradients are in files (memory.gradients): call "
            'step() or zero_grad() before it, or write memory.gradients = "host"'
        )
    again = placement.microbatches in ("reduced", "left")
    for bucket in placement.trainable:
        store = bucket.gradients.store
        if not again:
            store = _fit(bucket, placement, DTYPES[config.precision.reduce], "added")
        bucket.gradients.keep_adding(bucket.formats, store)
    if not again:
        placement.microbatches = "reduced"


def _fit(
    bucket: Bucket, placement: Placement, reduce: torch.dtype, microbatches: Microbatches
) -> OffloadedGradients | None:
    """Set the formats of a bucket's gradients, and return the store for them, where it has one."""
    local = reduce if microbatches == "added" else bucket.formats.local
    bucket.formats = replace(bucket.formats, reduce=reduce, local=local)
    store, states = bucket.gradients.store, bucket.offloaded_states
    if store is None or states is None:
        return store
    return placement.offload.gradients_of(states, bucket.region, reduce, microbatches)
