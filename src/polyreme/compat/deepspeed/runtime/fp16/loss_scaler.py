"""DeepSpeed's loss scalers, for training loops that a script writes itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.step.precision import LossScale

INITIAL_LOSS_SCALE, SCALE_WINDOW, MIN_LOSS_SCALE = "init_scale", "scale_window", "min_scale"
DELAYED_SHIFT, CONSECUTIVE_HYSTERESIS = "delayed_shift", "consecutive_hysteresis"
LossScaleProfile = StrEnum("LossScaleProfile", {"FUSED": "fused", "UNFUSED": "unfused"})
"""DeepSpeed's two sets of defaults for a loss scale, by the optimizer."""
_DEFAULTS = {"fused": (2.0**32, 1.0), "unfused": (2.0**16, 0.25)}
"""The dynamic loss scale at the first step, and the least one, of each set."""


@dataclass(init=False)
class LossScaleConfig:
    """A loss scale, and how it moves. With a dtype other than fp16 it is 1 and stays so."""

    use_grad_scaling: bool
    dynamic_loss_scale: bool = False
    cur_iter: int = 0
    cur_scale: float = 1.0
    last_overflow_iter: int | None = None
    scale_factor: float | None = None
    scale_window: int | None = None
    min_loss_scale: float | None = None

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: str = "fused",
        initial_dynamic_scale: float | None = None,
    ) -> None:
        first, least = _DEFAULTS[profile]
        self.use_grad_scaling = low_precision_dtype is torch.float16
        if self.use_grad_scaling:
            self.cur_scale = static_loss_scale
        if self.use_grad_scaling and dynamic_loss_scale:
            args = {INITIAL_LOSS_SCALE: initial_dynamic_scale or first, SCALE_WINDOW: 1000}
            args |= {MIN_LOSS_SCALE: least, **(dynamic_loss_args or {})}
            self.dynamic_loss_scale, self.last_overflow_iter, self.scale_factor = True, -1, 2.0
            self.cur_scale, self.scale_window = args[INITIAL_LOSS_SCALE], int(args[SCALE_WINDOW])
            self.min_loss_scale = args[MIN_LOSS_SCALE]


class LossScalerBase:
    """The base of the loss scalers: a number by which `backward` multiplies a loss."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """Return the number that losses are multiplied by."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return the gradients `grad_in` times the scale."""
        return tuple(map(self.scale_loss, grad_in))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call `backward` of the loss times the scale."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of `params` has an Inf or NaN. A static scale does not look, and says
        no."""
        return self.dynamic and any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """Raise or lower the scale after a step; `overflow` says whether its gradients had an Inf or NaN. A
        static scale stays."""


class LossScaler(LossScalerBase):
    """A static loss scale, which never moves."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A loss scale that is halved when a step overflows, and doubled after `scale_window` steps without an
    overflow, by `polyreme.step.precision.LossScale`.

    The first `delayed_shift` - 1 overflows leave it as it is. They are counted anew when it is doubled, or
    with `consecutive_hysteresis` after each step without an overflow. The scale does not fall below
    `min_scale`: with `raise_error_at_min_scale` an overflow there raises OrderError."""

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter, self.last_overflow_iter, self.scale_factor = 0, -1, 2.0
        self.scale_window, self.min_scale, self.delayed_shift = scale_window, min_scale, delayed_shift
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self._scale = LossScale(
            init_scale, dynamic=True, interval=scale_window, minimum=min_scale, hysteresis=delayed_shift,
            forgets=consecutive_hysteresis, delay=1
        )  # fmt: skip

    @property
    def cur_hysteresis(self) -> int:
        """Return how many overflows it takes from here until the scale is lowered."""
        return max(1, self.delayed_shift - self._scale.overflows)

    def update_scale(self, overflow: bool) -> None:
        if overflow and self._scale.is_least and self.raise_error_at_min_scale:
            raise OrderError(
                f"the step overflowed at the least loss scale, {self.min_scale}, which falls no further: "
                "check the data and the learning rate, or use bf16"
            )
        self._scale.update(overflow)
        self.cur_scale = self._scale.value
        self.last_overflow_iter = self.cur_iter if overflow else self.last_overflow_iter
        self.cur_iter += 1


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return a loss scaler for a dtype, which is static and 1 unless that is fp16. Raises ArgumentError for a
    dynamic one without arguments."""
    if dtype is not torch.half or not dynamic_scaling:
        return LossScaler(static_loss_scale if dtype is torch.half else 1.0)
    if dynamic_loss_args is None:
        raise ArgumentError("dynamic_loss_args is None: give a dynamic loss scale its arguments")
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
