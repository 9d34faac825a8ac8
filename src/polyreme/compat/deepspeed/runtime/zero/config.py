"""The section zero_optimization as an object: what is written in it, and DeepSpeed's defaults.

It says nothing of what becomes of a key; `polyreme inspect ds.json` does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import Field, model_validator

from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel, pp_int
from polyreme.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """What is sharded: nothing, optimizer states, gradients too, weights too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Modules whose parameters are gathered at once."""

    classes: list[str] = Field(default_factory=list)
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)


def _old(new: str, to: Any = None) -> Any:
    """An old name of a key; without `to`, its value goes nowhere."""
    extra: dict[str, Any] = {"deprecated": True, "new_param": new, "set_new_param": to is not None}
    return Field(None, json_schema_extra=extra | ({"new_param_fn": to} if to else {}))


def _on_cpu(kind: Any) -> Any:
    return lambda wanted: kind(device=OffloadDeviceEnum.cpu) if wanted else None


def _stage3(default: int, name: str) -> Any:
    return Field(default, ge=0, alias=f"stage3_{name}")


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """Every key by DeepSpeed's attribute; those that begin with `stage3_` are without it."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(pp_int(5e8), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(pp_int(5e8), ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: int = Field(pp_int(1e9), ge=0)
    cpu_offload_param: bool | None = _old("offload_param", _on_cpu(DeepSpeedZeroOffloadParamConfig))
    cpu_offload_use_pin_memory: bool | None = _old("offload_param or offload_optimizer")
    cpu_offload: bool | None = _old("offload_optimizer", _on_cpu(DeepSpeedZeroOffloadOptimizerConfig))
    prefetch_bucket_size: int = _stage3(pp_int(5e7), "prefetch_bucket_size")
    param_persistence_threshold: int = _stage3(pp_int(1e5), "param_persistence_threshold")
    model_persistence_threshold: int = _stage3(
        pp_int(sys.maxsize, "sys.maxsize"), "model_persistence_threshold"
    )
    max_live_parameters: int = _stage3(pp_int(1e9), "max_live_parameters")
    max_reuse_distance: int = _stage3(pp_int(1e9), "max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(pp_int(0), alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool | None = _old("gather_16bit_weights_on_model_save", bool)
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="before")
    @classmethod
    def _overlaps(cls, given: Any) -> Any:
        """At stage 3 communication overlaps by default."""
        if isinstance(given, Mapping) and given.get("overlap_comm") is None:
            stage = given.get("stage", 0)
            return {**given, "overlap_comm": stage == ZeroStageEnum.weights}
        return given


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section of a DeepSpeed config, or the older `true` for stage 1."""
    found = param_dict.get(ZERO_OPTIMIZATION) or {}
    return DeepSpeedZeroConfig(**({"stage": 1} if found is True else found))
