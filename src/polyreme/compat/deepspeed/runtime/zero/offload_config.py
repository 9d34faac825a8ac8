"""Where ZeRO keeps parameters and states, as objects."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel, pp_int


class OffloadDeviceEnum(StrEnum):
    """Places besides the device."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """States that can be moved."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_param`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(pp_int(1e8), ge=0)
    max_in_cpu: int = Field(pp_int(1e9), ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_optimizer`. `pipeline` is whether reading or writing is."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @property
    def pipeline(self) -> bool:
        """Whether states are read ahead or written behind."""
        return self.pipeline_read or self.pipeline_write

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The fields, and `pipeline`."""
        return super().model_dump(**options) | {"pipeline": self.pipeline}
