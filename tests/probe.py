"""What tests and benchmarks ask of an engine beyond its public face.

Invariant: no other file of theirs says where in an engine it lies, so that an engine whose inside changes
changes this file alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from polyreme import Engine
from polyreme.checkpoint.save import Payload
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.intervals import Interval, overlap
from polyreme.layout.region import MASTER
from polyreme.offload.host_transfer import HostTransfer
from polyreme.offload.optimizer_states import StateExtent
from polyreme.pipeline import executor
from polyreme.pipeline.schedule import Action
from polyreme.placement import settings
from polyreme.step.state.engine_state import payload
from polyreme.zero.bucket import Bucket
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.sharded_optimizer import ShardedOptimizer

# ---- buckets, and what is in them


def units(engine: Engine) -> list[Sequence[Bucket]]:
    """The buckets that are gathered together: the root's, then those of each block."""
    placement = engine._training.placement
    return [unit.buckets for unit in (placement.root, *placement.units)]


def buckets(engine: Engine) -> list[Bucket]:
    """All of this rank's, unit by unit."""
    return [bucket for unit in units(engine) for bucket in unit]


def trainable(engine: Engine) -> Sequence[Bucket]:
    """The buckets whose parameters are trained, in the order of registration."""
    return engine._training.placement.trainable


def weights(engine: Engine) -> Iterator[Any]:
    """The memory of this rank's weights, which are on the device: masters, shards, and the parameters where
    they stay whole."""
    for bucket in buckets(engine):
        yield from (bucket.master, bucket.shard)
        if not bucket.sharded:
            yield bucket.full


def gradients(engine: Engine) -> list[Tensor]:
    """All tensors on the device that hold gradients now."""
    return [tensor for bucket in trainable(engine) for tensor in bucket.gradients.live]


def reduced_gradients(engine: Engine) -> list[Tensor]:
    """Those of them whose gradients are reduced, or are to be."""
    return [grad for bucket in trainable(engine) if (grad := bucket.gradients.grad) is not None]


def optimizer_states(engine: Engine) -> Iterator[dict[str, Any]]:
    """The states of the optimizer by their names, piece by piece."""
    for optimizer in engine._training.sharded_optimizer:
        for _, state in optimizer.state.by_interval():
            yield state


def offloaded_states(engine: Engine) -> list[StateExtent]:
    """Where optimizer states are that are not on the device."""
    return [extent for bucket in trainable(engine) for extent in bucket.offloaded_states or ()]


def flip(engine: Engine, name: str, bit: int, masters: bool = True) -> bool:
    """Flip a bit (counted from the sign down) of a parameter's first number in the first shard, or of the
    optimizer's copy of it that this rank has. Returns whether there is one."""
    bucket, slot = engine._training.placement.where[name]
    start, stop = overlap(slot, bucket.region if masters else Interval(*bucket.layout.shard(0)))
    if start == stop:
        return False
    if not masters:
        number = bucket.full[start : start + 1]
    elif bucket.master is not None:
        number = bucket.master[start - bucket.region.start :][:1]
    else:
        number = bucket.read_masters(start, start + 1)
    words = number.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[number.element_size()])
    words ^= torch.iinfo(words.dtype).min if bit == 0 else 1 << 8 * number.element_size() - 1 - bit
    if masters and bucket.master is None and bucket.offloaded_states is not None:
        bucket.offloaded_states.write(MASTER, start, number)
    return True


def pool(engine: Engine) -> Pool:
    """What lends the buffers that parameters are gathered into and gradients are summed in."""
    return engine._training.placement.pool


# ---- a step


def before_passes(engine: Engine, call: Callable[[], object]) -> None:
    """Have `call` called before each forward and each backward of `train_step`."""
    passes = engine._training.passes
    enter = passes.enter

    def entered(*at: Any) -> None:
        call()
        enter(*at)

    passes.enter = entered  # type: ignore[assignment, method-assign]


def replace_row(engine: Engine, change: Callable[[Sequence[Action]], Any]) -> Any:
    """Have a step perform what `change` makes of this rank's row of actions, and return it."""
    made = change(engine._training.pipeline.row)
    object.__setattr__(engine._training.pipeline, "row", made)  # which is frozen
    return made


@contextmanager
def at_waits(call: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Have `call` called at every wait of a row of actions for messages, with the function that waits."""
    wait = executor.Row._wait
    with patch.object(executor.Row, "_wait", lambda *given: call(partial(wait, *given))):
        yield


def stages(engine: Engine) -> dict[int, tuple[int, bool]]:
    """Of each pipeline stage of this rank: its number of blocks, and whether it is the last of all."""
    found: dict[int, Any] = dict(engine._training.passes._stages.run)
    return {index: (stage._stop - stage._first, stage.is_last) for index, stage in found.items()}


def activations_away(engine: Engine) -> int:
    """How many activations are off the device now."""
    offload = engine._training.activations.offload
    return 0 if offload is None else len(offload._known)


def activations_written(engine: Engine) -> int:
    """Bytes of activations that have left the device."""
    offload = engine._training.activations.offload
    return 0 if offload is None else offload.traffic.written


def count_samples(engine: Engine, more: int) -> None:
    """Have this rank believe that it has seen more samples."""
    engine._step.progress.state.change(samples=engine.state.samples + more)


def take_in_writes(engine: Engine) -> None:
    """Take in what a script wrote to weights, as the next step does. All ranks must call."""
    engine._step.user_writes.take_in()


# ---- the engine as a whole


def saved(engine: Engine) -> Payload:
    """What this rank gives to a checkpoint."""
    return payload(engine._training.engine_state, None, {}, {})


def barrier(engine: Engine) -> None:
    """Wait for all ranks, beside training."""
    engine._training.saver.axis().barrier()


def loss_fn(engine: Engine) -> Any:
    """The loss function that the user gave."""
    return engine._training.objective._loss_fn


def renewed(engine: Engine) -> dict[str, object]:
    """What a refresh makes anew, by name."""
    training = engine._training
    return {
        "training": training,
        "placement": training.placement,
        "step": training.step,
        "reducer": training.reducer,
        "blocks": training.blocks,
        "loop": training.loop,
    }


def cuts(engine: Engine) -> dict[str, Cut]:
    """How each parameter is divided over tensor-parallel ranks."""
    known = engine._training.placement.division.parameters
    return {name: each.cut for name, each in known.items()}


def optimizer(engine: Engine) -> ShardedOptimizer:
    """The optimizer of this rank's shards."""
    return engine._training.sharded_optimizer


def keep_buffers_apart(engine: Engine) -> None:
    """Have ranks keep the buffers that their own forwards made."""
    engine._training.step.buffers.share = lambda *_: None  # type: ignore[method-assign]


def sequences(engine: Engine) -> Any:
    """The division of its sequences over `mesh.cp`."""
    return engine._training.context.sequences


def draw_as_one(engine: Engine) -> None:
    """Have all data-parallel ranks draw the same random numbers."""
    engine._training.context.randomness._place = (0, 0)


def parts(engine: Engine) -> list[object]:
    """What a traceback may hold of an engine that is closed."""
    return [engine._training]


# ---- what an engine is made beside


@contextmanager
def updated_elsewhere(transfer: Callable[[torch.device], HostTransfer]) -> Iterator[None]:
    """Have engines take their device, a CPU, for one that the CPU which updates is not, with this transfer
    between them."""
    with (
        patch.object(HostTransfer, "over", transfer),
        patch.object(settings, "shares_cpu_memory", lambda _: False),
    ):
        yield
