"""Loss scales for loops of a script's own; the engine has its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import log_dist

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"
FACTOR = 2.0
"""By which a dynamic loss scale rises and falls."""


class LossScaleProfile(StrEnum):
    """Which of DeepSpeed's two sets of defaults."""

    FUSED = "fused"
    UNFUSED = "unfused"


_DEFAULTS = {LossScaleProfile.FUSED: (2.0**32, 1.0), LossScaleProfile.UNFUSED: (2.0**16, 0.25)}
"""The first and the least dynamic loss scale."""


@dataclass(init=False)
class LossScaleConfig:
    """A loss scale and how it moves. With another dtype than fp16 it is 1 and stays so."""

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
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        first, least = _DEFAULTS[profile]
        self.use_grad_scaling = low_precision_dtype is torch.float16
        if not self.use_grad_scaling:
            return
        self.cur_scale = static_loss_scale
        if not dynamic_loss_scale:
            return
        args: dict[str, Any] = {
            INITIAL_LOSS_SCALE: initial_dynamic_scale or first,
            SCALE_WINDOW: 1000,
            MIN_LOSS_SCALE: least,
        }
        args |= dynamic_loss_args or {}
        self.dynamic_loss_scale, self.last_overflow_iter, self.scale_factor = True, -1, FACTOR
        self.cur_scale, self.scale_window = args[INITIAL_LOSS_SCALE], args[SCALE_WINDOW]
        self.min_loss_scale = args[MIN_LOSS_SCALE]


class LossScalerBase:
    """A loss scale, which `backward` multiplies a loss by."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """The gradients, multiplied by the scale."""
        return tuple(self.loss_scale * each for each in grad_in)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by the scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the loss times the scale."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient has an Inf or NaN; a static scale does not look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step; a static one stays."""


class LossScaler(LossScalerBase):
    """A static loss scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A loss scale that is halved when a step overflows, and doubled after `scale_window` steps without.

    The first `delayed_shift` - 1 overflows leave it alone; they are counted anew when it is doubled, or with
    `consecutive_hysteresis` after each step without. It does not fall below `min_scale`: with
    `raise_error_at_min_scale` an overflow there raises OrderError."""

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
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor, self.scale_window, self.min_scale = FACTOR, scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis, self.dtype = consecutive_hysteresis, dtype
        self.raise_error_at_min_scale = raise_error_at_min_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in params)

    has_overflow_serial = has_overflow

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self._lower()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _lower(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            log_dist(f"overflow: {self.cur_hysteresis} more to lower the loss scale", ranks=[0])
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise OrderError(
                f"Current loss scale already at minimum, {self.min_scale}, and the step overflowed: check "
                "the data and the learning rate, or use bf16"
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        log_dist(f"overflow: the loss scale is {self.cur_scale} now", ranks=[0])


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """The loss scale of a dtype: 1 but in fp16. Raises ArgumentError for a dynamic one without arguments."""
    if dtype is not torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise ArgumentError("dynamic_loss_args is None: give a dynamic loss scale its arguments")
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
