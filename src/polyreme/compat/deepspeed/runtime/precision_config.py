"""The config sections fp16 and bf16 as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from polyreme.compat.deepspeed.runtime.config_utils import section

BFLOAT16, BFLOAT16_OLD, FP16 = "bf16", "bfloat16", "fp16"
DeepSpeedBF16Config = section("DeepSpeedBF16Config", BFLOAT16)
_KEYS = ("loss_scale_window", "min_loss_scale")


class DeepSpeedFP16Config(section("DeepSpeedFP16Config", FP16)):  # type: ignore[misc]
    """The config section fp16, in which a loss scale of 0 stands for a dynamic one."""

    @field_validator("loss_scale", *_KEYS, mode="before")
    @classmethod
    def _is_a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"{value} is no finite number: write one, or leave the key out")
        return value

    @model_validator(mode="after")
    def _is_above_0(self) -> DeepSpeedFP16Config:
        for name in _KEYS if self.enabled and self.loss_scale == 0 else ():
            if getattr(self, name) <= 0:
                raise ValueError(f"fp16.{name} must be above 0 with a dynamic loss scale: write 1 or more")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the dynamic loss scale of the first step."""
        return 2 ** int(self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the keyword arguments of the section's `DynamicLossScaler`."""
        hysteresis = {"delayed_shift": self.hysteresis, "consecutive_hysteresis": self.consecutive_hysteresis}
        bounds = {"init_scale": self.initial_dynamic_scale(), "min_scale": self.min_loss_scale}
        return {**bounds, **hysteresis, "scale_window": self.loss_scale_window}


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """Return the section of a DeepSpeed config, which is called bf16 or bfloat16."""
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section fp16 of a DeepSpeed config."""
    return DeepSpeedFP16Config(**(param_dict.get(FP16) or {}))
