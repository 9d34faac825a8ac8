"""DeepSpeed's `offload_states` and `reload_states`, over `Engine.sleep` and `wake`."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.zero.bucket import Kind

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine

_KINDS: dict[OffloadStateTypeEnum, Kind] = {
    OffloadStateTypeEnum.optim_states: "states",
    OffloadStateTypeEnum.hp_params: "masters",
    OffloadStateTypeEnum.lp_params: "params",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradients",
}
SINCE = "engine.sleep(), or offload_states() on the DeepSpeed door: call engine.wake(), or reload_states()"
"""What errors say of what is away, and how it comes back."""


def offload(
    engine: DeepSpeedEngine,
    include: Container[OffloadStateTypeEnum] | None = None,
    device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Have these states of an engine, or all, be in host memory until `reload`, between two steps. All ranks
    must call. It returns when they are there, `non_blocking` or not.

    Raises ArgumentError for a device that is none of DeepSpeed's, or "nvme"; OrderError where parameters are
    off the device already, or there is no optimizer."""
    _check(engine)
    if engine.zero_offload_param() is not None:
        raise OrderError(
            "Moving states across devices is not supported for offloaded parameters: leave "
            "zero_optimization.offload_param out, or the call"
        )
    if device not in ("none", "cpu"):
        raise ArgumentError(
            f"offload_states(device={str(device)!r}): NVMe offload is not supported for offloading states, "
            'which go to "cpu"; zero_optimization.offload_optimizer keeps them in files all the time'
        )
    if device == "none":
        logger.warning("No device specified for offloading states.")
    elif kinds := {kind for state, kind in _KINDS.items() if include is None or state in include}:
        engine.polyreme.sleep(*kinds, pin=pin_memory, since=SINCE)


def reload(engine: DeepSpeedEngine, non_blocking: bool = False) -> None:
    """Have all that `offload` took away on the device again; it returns when it is there."""
    _check(engine)
    engine.polyreme.wake()


def _check(engine: DeepSpeedEngine) -> None:
    if engine.optimizer is None:
        raise OrderError("Moving states across devices is not supported without an optimizer")
