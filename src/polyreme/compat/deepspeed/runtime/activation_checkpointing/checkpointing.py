"""Recomputation of activations by DeepSpeed's calls (`deepspeed.checkpointing`): torch's own, without
re-entry.

Invariant: a recomputed function draws the random numbers that it drew before, also those of the tracker."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError, refused
from polyreme.compat.deepspeed.runtime.activation_checkpointing.rng import (
    MODEL_PARALLEL,
    CudaRNGStatesTracker,
)
from polyreme.compat.deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from polyreme.compat.deepspeed.utils.logging import logger

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_SEED_OFFSET = 2718  # between the seed of what all ranks share and that of what they divide
_TRACKER = CudaRNGStatesTracker()


@dataclass
class _Settings:
    configured: bool = False
    mpu: Any = None
    partition_activations: bool = False
    contiguous: bool = False
    num_layers: int | None = None
    in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False


_settings = _Settings()
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous",
    "number_checkpoints": "num_layers",
    "cpu_checkpointing": "in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""Of a config's section `activation_checkpointing`."""


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The generators of this process that have names."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator's generator alike on all ranks that divide a layer, and the tracker's
    `model-parallel-rng` differently on each."""
    _TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + _SEED_OFFSET + bwc_tensor_model_parallel_rank(_settings.mpu))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's `model-parallel-rng` alone."""
    with _TRACKER.fork():
        get_accelerator().manual_seed(seed + _SEED_OFFSET + bwc_tensor_model_parallel_rank(_settings.mpu))


def _section(config: Any) -> Mapping[str, Any]:
    """The section of a config: of its file, of a dict, or of an object that has one."""
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text("utf-8"))
    if isinstance(config, Mapping):
        return config.get("activation_checkpointing", {})
    section = config.activation_checkpointing_config
    return {key: getattr(section, key) for key in _KEYS}


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
    """Set how `checkpoint` works: by a config, then by what is given.

    `checkpoint_in_cpu` keeps inputs on the CPU; `synchronize` waits for the device around each call, and
    `profile` logs its time. Memory is never made contiguous: torch's allocator holds inputs as they are.
    Raises UnsupportedError for inputs that are to be divided between ranks that divide layers, and
    ArgumentError for contiguous memory that is not divided, or without a number."""
    global _settings
    made = _Settings(configured=True, mpu=_settings.mpu if mpu_ is None else mpu_)
    for key, value in (_section(deepspeed_config) if deepspeed_config is not None else {}).items():
        if key in _KEYS and value is not None:
            setattr(made, _KEYS[key], value)
    given = {
        "partition_activations": partition_activations,
        "contiguous": contiguous_checkpointing,
        "num_layers": num_checkpoints,
        "in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, value in given.items():
        if value is not None:
            setattr(made, name, value)
    _check(made)
    _settings = made


def _check(settings: _Settings) -> None:
    if settings.contiguous and not settings.partition_activations:
        raise ArgumentError("contiguous checkpointing needs partition_activations: set it, too")
    if settings.contiguous and settings.num_layers is None:
        raise ArgumentError("contiguous checkpointing needs the number of layers: set num_checkpoints")
    if settings.contiguous:
        logger.warning_once("contiguous checkpointing changes nothing here: torch's allocator places inputs")
    if settings.partition_activations and bwc_tensor_model_parallel_world_size(settings.mpu) > 1:
        raise refused(
            "partition_activations over tensor-parallel ranks",
            "each of them keeps the inputs of its layers whole",
            "set partition_activations to false; checkpoint_in_cpu makes room on the device",
        )


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _settings.configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `partition_activations` alone, as `configure` does."""
    changed = _Settings(**{**vars(_settings), "partition_activations": partition_activation})
    _check(changed)
    _settings.partition_activations = partition_activation


def set_num_layers(nlayers: int | None) -> None:
    """Set how many checkpoints a forward has."""
    _settings.num_layers = nlayers


def reset() -> None:
    """Do nothing: no buffers are kept from one forward to the next."""


def _tracked() -> tuple[Any, Any]:
    """Contexts of a forward and of its recomputation, in which the tracker's generators begin alike."""
    before = _TRACKER.get_states()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = _TRACKER.get_states()
        _TRACKER.set_states(dict(before))
        try:
            yield
        finally:
            _TRACKER.set_states(now)

    return contextlib.nullcontext(), again()


def _watched(function: Callable[..., Any], settings: _Settings) -> Callable[..., Any]:
    """`function`, timed and waited for as the settings say."""

    def run(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().synchronize()
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            get_accelerator().synchronize()
            if settings.profile and (not dist.is_initialized() or dist.get_rank() == 0):
                logger.info(f"checkpointed call: {(time.perf_counter() - began) * 1000:.2f} ms")

    return run if settings.synchronize or settings.profile else function


def _moves(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point() and value.device.type != "cpu"


def _from_cpu(function: Callable[..., Any], devices: list[Any]) -> Callable[..., Any]:
    """`function` of inputs that lie on the CPU, and are put on these devices first."""

    def run(*args: Any, **kwargs: Any) -> Any:
        put = [each if at is None else each.to(at) for each, at in zip(args, devices, strict=True)]
        return function(*put, **kwargs)

    return run


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The outputs of `function`, whose inner activations are computed again in the backward. Of a tuple of
    one output the output."""
    run = _watched(function, _settings)
    if _settings.in_cpu:
        moves = [
            torch.is_tensor(each) and each.is_floating_point() and each.device.type != "cpu" for each in args
        ]
        run = _from_cpu(
            run, [each.device if moved else None for each, moved in zip(args, moves, strict=True)]
        )
        args = tuple(each.cpu() if moved else each for each, moved in zip(args, moves, strict=True))
    context_fn = _tracked if _TRACKER.states_ else noop_context_fn
    out = torch_checkpoint(run, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
    return out[0] if isinstance(out, tuple) and len(out) == 1 else out


non_reentrant_checkpoint = checkpoint
