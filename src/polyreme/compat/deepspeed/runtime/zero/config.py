"""The config section `zero_optimization` as an object, with DeepSpeed's defaults for what is not written in
it.

`polyreme inspect ds.json` says what becomes of each key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import Field, model_validator

from polyreme.compat.deepspeed.runtime.config_utils import section
from polyreme.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from polyreme.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum as OffloadDeviceEnum

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """The stages of ZeRO: nothing is sharded, optimizer states are, gradients too, weights too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796


def _old(new: str, to: Any = None) -> Any:
    """Return the field of an old key, whose true value makes the section `to` with the device "cpu" for the
    key `new`. Without `to` its value is dropped."""
    made = (lambda wanted: to(device="cpu") if wanted else None) if to else None
    extra: Any = {"deprecated": True, "new_param": new, "set_new_param": to is not None, "new_param_fn": made}
    return bool | None, Field(None, json_schema_extra=extra)


DeepSpeedZeroLeafModuleConfig = section(
    "DeepSpeedZeroLeafModuleConfig", "none of its keys is in the table", **{
        name: (list[str], Field(default_factory=list)) for name in ("classes", "names", "name_suffixes")
    }
)  # fmt: skip


class DeepSpeedZeroConfig(
    section(  # type: ignore[misc]
        "DeepSpeedZeroConfig",
        ZERO_OPTIMIZATION,
        stage=(ZeroStageEnum, ZeroStageEnum.disabled),
        offload_param=(DeepSpeedZeroOffloadParamConfig | None, None),
        offload_optimizer=(DeepSpeedZeroOffloadOptimizerConfig | None, None),
        zenflow=(dict[str, Any] | None, None),
        cpu_offload_param=_old("offload_param", DeepSpeedZeroOffloadParamConfig),
        cpu_offload_use_pin_memory=_old("offload_param or offload_optimizer"),
        cpu_offload=_old("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        leaf_module=(DeepSpeedZeroLeafModuleConfig, Field(default_factory=DeepSpeedZeroLeafModuleConfig)),
    )
):
    """The section, with an attribute for each key, which DeepSpeed's names without a leading `stage3_`."""

    @model_validator(mode="before")
    @classmethod
    def _overlaps(cls, given: Any) -> Any:
        """Set overlap_comm, if it is not written: true at stage 3, false below."""
        if isinstance(given, Mapping) and given.get("overlap_comm") is None:
            return {**given, "overlap_comm": given.get("stage", 0) == ZeroStageEnum.weights}
        return given


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section of a DeepSpeed config, which may be written as `true`, for stage 1."""
    found = param_dict.get(ZERO_OPTIMIZATION) or {}
    return DeepSpeedZeroConfig(**({"stage": 1} if found is True else found))
