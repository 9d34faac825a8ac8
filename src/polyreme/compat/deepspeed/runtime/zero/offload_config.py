"""The config sections that say where ZeRO keeps parameters and optimizer states, as objects."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.runtime.config_utils import section

OffloadDeviceEnum = StrEnum("OffloadDeviceEnum", "none cpu nvme")
"""The places for what is kept off the device."""
OffloadStateTypeEnum = StrEnum(
    "OffloadStateTypeEnum", "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
)
"""The states that `engine.offload_states` can move."""
MIN_SWAPPABLE_BYTES = 2**20
"""Bytes of the smallest tensor that DeepSpeed moves to a file; here smaller ones go, too."""
_PLACE: Any = {"device": (OffloadDeviceEnum, "none"), "nvme_path": (Path | None, None)}

DeepSpeedZeroOffloadParamConfig = section(
    "DeepSpeedZeroOffloadParamConfig", "zero_optimization.offload_param", **_PLACE
)


class DeepSpeedZeroOffloadOptimizerConfig(
    section("DeepSpeedZeroOffloadOptimizerConfig", "zero_optimization.offload_optimizer", **_PLACE)  # type: ignore[misc]
):
    """The config section `zero_optimization.offload_optimizer`."""

    @property
    def pipeline(self) -> bool:
        """Return whether the section asks to read states ahead of their update, or to write them behind
        it."""
        return bool(self.pipeline_read or self.pipeline_write)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the fields and `pipeline` as a dictionary."""
        return {**super().model_dump(**options), "pipeline": self.pipeline}
