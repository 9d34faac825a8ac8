"""How the micro-batches of a step are added up, which config and ranks decide.

Invariant: an engine of one micro-batch a step keeps no room for sums. `make_room` gives it that when a loop
first asks for several; from then on it is as one that was made for them. Communication: none."""

from __future__ import annotations

from dataclasses import replace

import torch

from polyreme.config import Config
from polyreme.config.schema import is_files, tiers_of
from polyreme.errors import BatchError
from polyreme.step.precision import DTYPES
from polyreme.zero.bucket_gradients import Microbatches
from polyreme.zero.partition import Placement
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
    offload = placement.offload
    if offload.gradient_files is not None:
        raise BatchError(
            "set_boundary(False) with gradients in files (memory.gradients), which were laid out for one "
            f"micro-batch a step by batch.size = {config.batch.size}: write a larger batch.size, a smaller "
            'batch.micro, or memory.gradients = "host"'
        )
    microbatches = added(config, dp)
    reduce = reduced_format(config, ranks, microbatches)
    for bucket in placement.trainable:
        local = reduce if microbatches == "added" else bucket.formats.local
        bucket.formats = replace(bucket.formats, reduce=reduce, local=local)
        store = bucket.gradients.store
        if store is not None and bucket.offloaded_states is not None:
            store = offload.gradient_store(bucket.offloaded_states, bucket.region, reduce, microbatches)
        bucket.gradients.make_room(microbatches, bucket.formats, store)
    placement.microbatches = microbatches
    reducer.every_time = each_time(config, dp, microbatches)
