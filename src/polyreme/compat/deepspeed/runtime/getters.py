"""What the engine's getters of the config (`engine.zero_reduce_bucket_size()`) return, and what else scripts
ask an engine for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyreme.compat.deepspeed import comm
from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.runtime.torch_autocast import get_default_autocast_lower_precision_modules
from polyreme.compat.deepspeed.runtime.zero import offload_states
from polyreme.compat.deepspeed.saving import make_executable
from polyreme.step.precision import AUTOCAST, DTYPES

ALIASES = {
    "autotp_size": "tensor_parallel.autotp_size",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "cpuadam_cores_perc": "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "loss_scale": "fp16.loss_scale",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "super_offload": "zero_optimization.offload_optimizer.super_offload",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_partial_offload": "zero_optimization.offload_optimizer.ratio",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization_stage": "zero_optimization.stage",
}
PREFIXES = {
    "zero_": ("zero_optimization.", "zero_optimization.stage3_", "zero_optimization.zero_"),
    "flops_profiler_": ("flops_profiler.",),
}


def _offload(name: str) -> Callable[[Translation], Any]:
    """The section of what is off the device; None where it is not."""
    section = f"zero_optimization.offload_{name}"

    def get(given: Translation) -> Any:
        found = given.section(section)
        return found if found.get("device", "none") not in (None, "none") else None

    return get


COMPUTED: Mapping[str, Callable[[Translation], Any]] = {
    "aio_config": lambda given: given.section("aio"),
    "autotuning_enabled": lambda given: False,
    "checkpoint_tag_validation_enabled": lambda given: given.values["checkpoint.tag_validation"] != "ignore",
    "checkpoint_tag_validation_fail": lambda given: given.values["checkpoint.tag_validation"] == "fail",
    "curriculum_learning_enabled": lambda given: False,
    "data_efficiency_enabled": lambda given: False,
    "data_sampling_enabled": lambda given: False,
    "dynamic_loss_scale": lambda given: given.values["fp16.loss_scale"] == 0,
    "gradient_predivide_factor": lambda given: given.values["gradient_predivide_factor"] or 1.0,
    "initial_dynamic_scale": lambda given: 2 ** given.values["fp16.initial_scale_power"],
    "is_deepcompile_enabled": lambda given: False,
    "load_universal_checkpoint": lambda given: given.values["checkpoint.load_universal"],
    "optimizer_name": lambda given: given.optimizer and given.optimizer.name.lower(),
    "optimizer_params": lambda given: given.optimizer and given.optimizer.params,
    "postscale_gradients": lambda given: not given.values["prescale_gradients"],
    "random_ltd_enabled": lambda given: False,
    "scheduler_name": lambda given: given.scheduler and given.scheduler.name,
    "scheduler_params": lambda given: given.scheduler and given.scheduler.params,
    "torch_autocast_dtype": lambda given: AUTOCAST.get(f"autocast-{given.autocast}"),
    "torch_autocast_lower_precision_safe_modules": lambda given: (
        given.values["torch_autocast.lower_precision_safe_modules"]
        or get_default_autocast_lower_precision_modules()
    ),
    "tensor_parallel_config": lambda given: given.section("tensor_parallel"),
    "zero_cpu_offload": lambda given: _offload("optimizer")(given) is not None,
    "zero_overlap_comm": lambda given: (
        given.stage == 3
        if given.values["zero_optimization.overlap_comm"] is None
        else given.values["zero_optimization.overlap_comm"]
    ),
    "zero_use_cpu_optimizer": lambda given: _offload("optimizer")(given) is not None,
    "zero_offload_optimizer": _offload("optimizer"),
    "zero_offload_param": _offload("param"),
    "zero_optimization": lambda given: given.stage > 0,
    "zero_optimization_partition_gradients": lambda given: given.stage >= 2,
    "zero_optimization_partition_weights": lambda given: given.stage == 3,
}


def _reduced(bucket_size: int = 0) -> None:
    """Do nothing: `backward` and `step` sum the gradients over the ranks."""


def _states_file(folder: str, tag: Any, expp_rank: int) -> str:
    """Where DeepSpeed keeps optimizer states of experts; nothing is written there."""
    return str(Path(folder) / str(tag) / f"expp_rank_{expp_rank}_mp_rank_00_optim_states.pt")


def _config(engine: Any) -> Any:
    """The engine's config as an object."""
    from polyreme.compat.deepspeed.runtime.config import DeepSpeedConfig  # which imports this module

    return DeepSpeedConfig(engine.config, engine.mpu)


def _data_types(engine: Any) -> tuple[torch.dtype, torch.dtype]:
    """In what the model computes, and in what its gradients are added up."""
    precision = engine.polyreme.config.precision
    return DTYPES[precision.compute], DTYPES[precision.reduce]


def _communicated(engine: Any) -> torch.dtype:
    """What the config says that gradients travel in; else in what the model computes."""
    return DTYPES[
        engine.translation.values["communication_data_type"] or engine.polyreme.config.precision.compute
    ]


FACTS: Mapping[str, Callable[[Any], Any]] = {
    "_config": _config,
    "_change_recovery_script_permissions": lambda engine: make_executable,
    "_get_optimizer_ckpt_name": lambda engine: _states_file,
    "local_rank": lambda engine: comm.get_local_rank(),
    "get_data_types": lambda engine: lambda: _data_types(engine),
    "communication_data_type": _communicated,
    "has_moe_layers": lambda engine: False,
    "sequence_parallel_size": lambda engine: 1,
    "seq_dp_world_size": lambda engine: engine.dp_world_size,
    "enable_backward_allreduce": lambda engine: True,
    "allreduce_gradients": lambda engine: _reduced,
    "offload_states": lambda engine: partial(offload_states.offload, engine),
    "reload_states": lambda engine: partial(offload_states.reload, engine),
}
"""Attributes of an engine that its config does not decide."""

AXES = {"data": "dp", "tensor": "tp", "model": "tp", "pipeline": "pp", "sequence": "cp"}
"""The axes of our mesh by the names that DeepSpeed's engine has for their ranks and sizes."""


def place(engine: Any, name: str) -> Callable[[], int] | None:
    """The getter of this rank's place on an axis (`get_data_parallel_rank`), or of the axis' size
    (`..._world_size`); None where `name` is no such one."""
    kind, _, what = name.removeprefix("get_").partition("_parallel_")
    if not name.startswith("get_") or kind not in AXES or what not in ("rank", "world_size"):
        return None
    axis = getattr(engine.polyreme.mesh, AXES[kind])
    return lambda: axis.rank if what == "rank" else axis.size


def getter(given: Translation, name: str) -> Callable[[], Any] | None:
    """The getter `name` of the config; None where there is no such one."""
    if name in COMPUTED:
        return lambda: COMPUTED[name](given)
    paths = [ALIASES.get(name, ""), name]
    for prefix, sections in PREFIXES.items():
        if name.startswith(prefix):
            paths += [section + name.removeprefix(prefix) for section in sections]
    path = next((path for path in paths if path in given.values), None)
    return None if path is None else lambda: given.values[path]
