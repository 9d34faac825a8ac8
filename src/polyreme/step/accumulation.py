"""How the micro-batches of a step are added up, which config and ranks decide.

Invariant: an engine of one micro-batch a step keeps no room for sums. `make_room` gives it that when a loop
first asks for several; from then on it is as one that was made for them. Communication: none."""

from __future__ import annotations

import torch

from polyreme.config import Config
from polyreme.config.schema import is_files, tiers_of
from polyreme.distributed.mesh import Mesh
from polyreme.errors import BatchError
from polyreme.offload.gradients import OffloadedGradients
from polyreme.placement.placement import Placement
from polyreme.step.precision import DTYPES
from polyreme.zero.bucket import Bucket
from polyreme.zero.gradient_sums import Accumulation, Reduced, Whole


def accumulation_of(config: Config, mesh: Mesh, several: bool) -> Accumulation:
    """How one micro-batch, or `several`, are added up on the ranks of a mesh. Where nothing is summed,
    reduced gradients have the format that they come in."""
    precision, ranks = config.precision, mesh.loss.size
    compute, reduce = DTYPES[precision.compute], DTYPES[precision.reduce]
    if not several:
        return Accumulation("whole", compute, compute if mesh.world_size == 1 else reduce, several=False)
    host = tiers_of(config.memory.states)[0] != ["device"]
    # then nothing that grows with the model stays on the device
    offloaded = host and tiers_of(config.memory.params)[0] != ["device"]
    offloaded = offloaded or is_files(tiers_of(config.memory.gradients)[0])
    if offloaded and (ranks == 1 or _each_time(config, ranks)):
        return Accumulation("stored", compute, reduce)
    if _each_time(config, ranks):
        return Accumulation("reduced", compute, reduce)
    return Accumulation("whole", reduce, reduce)


def _each_time(config: Config, ranks: int) -> bool:
    return config.zero.reduce_every == "microbatch" and ranks > 1


def has_room(placement: Placement) -> bool:
    """Whether several micro-batches can be added up."""
    return all(bucket.gradients.sums.several for bucket in placement.trainable)


def make_room(placement: Placement, config: Config, mesh: Mesh) -> None:
    """Let an engine of one micro-batch a step add several up from the coming step on. Raises BatchError where
    gradients are in files, which have space for one."""
    if has_room(placement):
        return
    _refuse_files(
        placement,
        "set_boundary(False) with gradients in files (memory.gradients), which were laid out for one "
        f"micro-batch a step by batch.size = {config.batch.size}: write a larger batch.size, a smaller "
        'batch.micro, or memory.gradients = "host"',
    )
    several = accumulation_of(config, mesh, several=True)
    for bucket in placement.trainable:
        store = _store(bucket, placement, several.reduce, several.how == "stored")
        bucket.gradients.make_room(several.of(bucket.residency, bucket.axis, store))


def keep_adding(placement: Placement, config: Config, mesh: Mesh) -> None:
    """Let more gradients be added to those of a step that are reduced already. Raises BatchError where they
    are in files."""
    _refuse_files(
        placement,
        "a backward after the last one of a step, whose gradients are in files (memory.gradients): call "
        'step() or zero_grad() before it, or write memory.gradients = "host"',
    )
    reduce, each = DTYPES[config.precision.reduce], _each_time(config, mesh.loss.size)
    for bucket in placement.trainable:
        sums = bucket.gradients.sums
        if isinstance(sums, Whole):
            sums = Reduced(reduce, reduce, _store(bucket, placement, reduce), reduces_each=each)
        bucket.gradients.keep_adding(sums)


def _refuse_files(placement: Placement, why: str) -> None:
    gradients = placement.offload.gradients
    if gradients is not None and not gradients.in_memory:
        raise BatchError(why)


def _store(
    bucket: Bucket, placement: Placement, dtype: torch.dtype, adds: bool = False
) -> OffloadedGradients | None:
    """Another store for the reduced gradients of a bucket, where it has one."""
    states = bucket.offloaded_states
    if bucket.gradients.sums.store is None or states is None:
        return None
    return placement.offload.gradients_of(states, bucket.region, dtype, adds)
