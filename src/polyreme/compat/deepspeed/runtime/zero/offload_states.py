"""The engine's `offload_states` and `reload_states`, by `polyreme.Engine.sleep` and `wake`."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.zero.bucket import MemoryKind

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine

_KINDS: dict[OffloadStateTypeEnum, MemoryKind] = {
    OffloadStateTypeEnum.optim_states: "states",
    OffloadStateTypeEnum.hp_params: "masters",
    OffloadStateTypeEnum.lp_params: "params",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradients",
}
SINCE = "engine.sleep(), or offload_states() on the DeepSpeed door: call engine.wake(), or reload_states()"
"""The words that errors have for the call that moved states away, and for the one that returns them."""


def offload(
    engine: DeepSpeedEngine,
    include: Container[OffloadStateTypeEnum] | None = None,
    device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move the engine's states named in `include`, or all, to host memory until `reload`, between two steps.
    All ranks must call. The states are there when this returns, `non_blocking` or not.

    Raises ArgumentError for a device other than "cpu" and "none", and OrderError if the config keeps
    parameters off the device, or the engine has no optimizer."""
    _check(engine)
    if engine.zero_offload_param() is not None:
        raise OrderError(
            "offload_states() beside zero_optimization.offload_param, which has parameters off the device "
            "all the time: leave one of them out"
        )
    if device not in ("none", "cpu"):
        raise ArgumentError(
            f"offload_states(device={str(device)!r}), and states go to host memory between steps: write "
            '"cpu", or zero_optimization.offload_optimizer to keep them in files all the time'
        )
    if device == "none":
        logger.warning('offload_states(device="none") moves nothing: write "cpu"')
    elif kinds := {kind for state, kind in _KINDS.items() if include is None or state in include}:
        engine.polyreme.sleep(*kinds, pin=pin_memory, since=SINCE)


def reload(engine: DeepSpeedEngine, non_blocking: bool = False) -> None:
    """Move all that `offload` took to the host back to the device; it is there when this returns."""
    _check(engine)
    engine.polyreme.wake()


def _check(engine: DeepSpeedEngine) -> None:
    if engine.optimizer is None:
        raise OrderError(
            "offload_states() or reload_states() of an engine that has no optimizer: give it one"
        )
