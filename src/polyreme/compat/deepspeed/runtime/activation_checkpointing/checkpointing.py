"""Recomputation of activations by DeepSpeed's functions (`deepspeed.checkpointing`), which call torch's own
checkpoint without re-entry.

Invariant: a recomputed function draws the random numbers that it drew before, also those of the tracker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError, refused
from polyreme.compat.deepspeed.utils.groups import (
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from polyreme.compat.deepspeed.utils.logging import logger

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_SEED_OFFSET = 2718  # between the seed of what all ranks share and that of what they divide


class CudaRNGStatesTracker:
    """Streams of random numbers by name, each with a seed of its own. `fork` draws numbers of one in place of
    the accelerator's, and goes on where the last fork of it ended."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of each stream, by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Continue each stream from its state in `states`; those that are not in it are forgotten."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Begin a stream. Raises ArgumentError for a name or a seed that another one has."""
        if name in self.states_ or seed in self.seeds_:
            raise ArgumentError(
                f"random numbers {name!r} with seed {seed}: another stream has this name or this seed, and "
                "would draw the same; choose others"
            )
        generator = torch.Generator(get_accelerator().current_device_name())
        self.states_[name] = generator.manual_seed(seed).get_state()
        self.seeds_.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw the random numbers of the block from this stream. Raises ArgumentError for one that has not
        begun."""
        if (state := self.states_.get(name)) is None:
            raise ArgumentError(
                f"no random numbers {name!r} have begun, only {sorted(self.states_)}: call add(name, seed) "
                "or model_parallel_cuda_manual_seed(seed)"
            )
        device = get_accelerator()
        with contextlib.ExitStack() as after:  # whose calls are made from the last to the first
            after.callback(device.set_rng_state, device.get_rng_state())
            device.set_rng_state(state)
            after.callback(lambda: self.states_.update({name: device.get_rng_state()}))
            yield


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the streams of this process."""
    return _CUDA_RNG_STATE_TRACKER


def _seed_of_rank(seed: int) -> int:
    return seed + _SEED_OFFSET + bwc_tensor_model_parallel_rank(_settings.mpu)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator's generator, equally on all ranks that divide a layer, and the stream
    `model-parallel-rng`, differently on each."""
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, _seed_of_rank(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the stream `model-parallel-rng` alone, differently on each rank that divides a layer."""
    with _CUDA_RNG_STATE_TRACKER.fork():
        get_accelerator().manual_seed(_seed_of_rank(seed))


@dataclass(frozen=True)
class _Settings:
    """The keys of the config section `activation_checkpointing`, the mpu that knows which ranks divide
    layers, and whether `configure` was called."""

    mpu: Any = None
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    configured: bool = False


_settings = _Settings()


def _section(config: Any) -> Mapping[str, Any]:
    """Return the section of a config, which is the path of a file, a dictionary, or a DeepSpeedConfig."""
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text("utf-8"))
    if isinstance(config, Mapping):
        return config.get("activation_checkpointing", {})
    return config.activation_checkpointing_config


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` works, by a config and by the arguments, which count before it.

    `checkpoint_in_cpu` keeps the inputs on the CPU. `synchronize`, `profile` and `contiguous_checkpointing`
    change nothing. Raises UnsupportedError for `partition_activations` over tensor-parallel ranks, and
    ArgumentError for `contiguous_checkpointing` without `partition_activations` and `num_checkpoints`."""
    written = {} if deepspeed_config is None else _section(deepspeed_config)
    given = {
        "mpu": mpu_,
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    known = {each.name for each in fields(_Settings)}
    of_config = {key: value for key, value in written.items() if key in known}
    _set(_Settings(mpu=_settings.mpu, configured=True), of_config, given)


def _set(made: _Settings, *changes: Mapping[str, Any]) -> None:
    """Change the module's settings to `made`, with those of `changes` that are not None. Raises for settings
    that cannot be, as `configure` does."""
    global _settings
    for change in changes:
        made = replace(made, **{name: value for name, value in change.items() if value is not None})
    if made.contiguous_memory_optimization:
        if not made.partition_activations or made.number_checkpoints is None:
            raise ArgumentError(
                "contiguous checkpointing is of divided inputs in a buffer of known size: set "
                "partition_activations and num_checkpoints, too, or leave it out, as it changes nothing here"
            )
        logger.warning_once("contiguous checkpointing changes nothing here: torch's allocator places inputs")
    if made.partition_activations and bwc_tensor_model_parallel_world_size(made.mpu) > 1:
        raise refused(
            "partition_activations over tensor-parallel ranks",
            "each of them keeps the inputs of its layers whole",
            "set partition_activations to false; checkpoint_in_cpu makes room on the device",
        )
    _settings = made


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _settings.configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `partition_activations` alone; raises as `configure` does."""
    _set(_settings, {"partition_activations": partition_activation})


def set_num_layers(nlayers: int | None) -> None:
    """Set the number of checkpoints in a forward, which contiguous memory would need to know."""
    _set(_settings, {"number_checkpoints": nlayers})


def reset() -> None:
    """Do nothing: no buffers are kept from one forward to the next."""


def _tracked() -> tuple[Any, Any]:
    """Return the contexts of a forward and of its recomputation, in which the tracker's streams begin
    alike."""
    tracker = _CUDA_RNG_STATE_TRACKER
    before = tracker.get_states()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = tracker.get_states()
        tracker.set_states(dict(before))
        try:
            yield
        finally:
            tracker.set_states(now)

    return contextlib.nullcontext(), again()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the outputs of `function`, or the only one. Its activations are not kept, but computed again in
    the backward."""
    moves = [
        _settings.cpu_checkpointing and torch.is_tensor(each) and each.is_floating_point() for each in args
    ]
    devices = [each.device if moved else None for each, moved in zip(args, moves, strict=True)]

    def run(*kept: Any, **more: Any) -> Any:
        put = [each if at is None else each.to(at) for each, at in zip(kept, devices, strict=True)]
        return function(*put, **more)

    kept = [each.cpu() if moved else each for each, moved in zip(args, moves, strict=True)]
    context_fn = _tracked if _CUDA_RNG_STATE_TRACKER.states_ else noop_context_fn
    out = torch_checkpoint(run, *kept, use_reentrant=False, context_fn=context_fn, **kwargs)
    return out[0] if isinstance(out, tuple) and len(out) == 1 else out


non_reentrant_checkpoint = checkpoint
