"""The sections fp16 and bf16 as objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from polyreme.compat.deepspeed.runtime.fp16 import loss_scaler

BFLOAT16, BFLOAT16_OLD, FP16 = "bf16", "bfloat16", "fp16"


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """`bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """`fp16`. A loss scale of 0 is a dynamic one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError("must be a finite number")
        return value

    @field_validator("loss_scale")
    @classmethod
    def _is_no_less_than_0(cls, value: float) -> float:
        if value < 0:
            raise ValueError("must be >= 0, where 0 is a dynamic loss scale")
        return value

    @model_validator(mode="after")
    def _is_above_0(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"fp16.{name} must be > 0 with a dynamic loss scale")
        return self

    def initial_dynamic_scale(self) -> int:
        """The dynamic loss scale of the first step."""
        return 2**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Arguments of a `DynamicLossScaler`."""
        return {
            loss_scaler.INITIAL_LOSS_SCALE: self.initial_dynamic_scale(),
            loss_scaler.SCALE_WINDOW: self.loss_scale_window,
            loss_scaler.DELAYED_SHIFT: self.hysteresis,
            loss_scaler.CONSECUTIVE_HYSTERESIS: self.consecutive_hysteresis,
            loss_scaler.MIN_LOSS_SCALE: self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section of a DeepSpeed config, by either of its names."""
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section of a DeepSpeed config."""
    return DeepSpeedFP16Config(**(param_dict.get(FP16) or {}))
