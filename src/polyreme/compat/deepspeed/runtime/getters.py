"""The methods of DeepSpeed's engine that return a value of its config, such as
`engine.zero_reduce_bucket_size()`, and further attributes that scripts read of an engine."""

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
    """Return a getter of the config section offload_`name`; of None if that puts nothing off the device."""
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


def _done(*_: Any, **__: Any) -> None:
    """Do nothing: `backward` and `step` sum gradients over the ranks, and keep nothing gathered."""


def _momentum(group: Mapping[str, Any]) -> Any:
    """Return the betas of an optimizer's group, or its momentum; 0 if it has neither."""
    return group.get("betas", group.get("momentum", 0.0))


def _states_file(folder: str, tag: Any, expp_rank: int) -> str:
    """Return the path at which DeepSpeed keeps the optimizer states of experts. Polyreme writes nothing
    there."""
    return str(Path(folder) / str(tag) / f"expp_rank_{expp_rank}_mp_rank_00_optim_states.pt")


def _config(engine: Any) -> Any:
    """Return the engine's config as an object of DeepSpeed's class."""
    from polyreme.compat.deepspeed.runtime.config import DeepSpeedConfig  # which imports this module

    return DeepSpeedConfig(engine.config, engine.mpu)


def _data_types(engine: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype that the model computes in, and the one that its gradients are added up in."""
    precision = engine.polyreme.config.precision
    return DTYPES[precision.compute], DTYPES[precision.reduce]


def _communicated(engine: Any) -> torch.dtype:
    """Return the config's communication_data_type; without one, the dtype that the model computes in."""
    return DTYPES[
        engine.translation.values["communication_data_type"] or engine.polyreme.config.precision.compute
    ]


FACTS: Mapping[str, Callable[[Any], Any]] = {
    # attributes
    "_config": _config,
    **dict.fromkeys(("config", "config_dict"), lambda engine: engine.translation.source),  # as it was given
    "device": lambda engine: engine.polyreme.mesh.device,
    "world_size": lambda engine: engine.polyreme.mesh.world_size,
    "dp_world_size": lambda engine: engine.polyreme.mesh.dp.size,
    "seq_dp_world_size": lambda engine: engine.polyreme.mesh.dp.size,
    "mp_world_size": lambda engine: engine.polyreme.mesh.tp.size,
    "global_rank": lambda engine: engine.polyreme.mesh.rank,
    "local_rank": lambda engine: comm.get_local_rank(),
    "sequence_parallel_size": lambda engine: 1,
    "has_moe_layers": lambda engine: False,
    "enable_backward_allreduce": lambda engine: True,
    "is_compiled": lambda engine: engine._compiled,
    "monitor": lambda engine: engine.telemetry.monitor,
    "timers": lambda engine: engine.telemetry.timers,
    "flops_profiler": lambda engine: engine.telemetry.profiler,
    "communication_data_type": _communicated,
    # methods
    "_change_recovery_script_permissions": lambda engine: make_executable,
    "_get_optimizer_ckpt_name": lambda engine: _states_file,
    "get_data_types": lambda engine: lambda: _data_types(engine),
    "get_sequence_parallel_group": lambda engine: lambda: None,
    "allreduce_gradients": lambda engine: _done,
    "empty_partition_cache": lambda engine: _done,
    "offload_states": lambda engine: partial(offload_states.offload, engine),
    "reload_states": lambda engine: partial(offload_states.reload, engine),
    "get_batch_info": lambda engine: lambda: (
        engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps()
    ),
    # False within a window, too
    "was_step_applied": lambda engine: lambda: engine._applied,
    # of the last step's gradients before clipping; None before the first step
    "get_global_grad_norm": lambda engine: lambda: None if engine.last is None else engine.last.grad_norm,
    "get_mom": lambda engine: lambda: [_momentum(group) for group in engine._groups()],
    "get_type": lambda engine: lambda: [group.get("type") for group in engine._groups()],
}  # fmt: skip
"""Attributes and methods of an engine that are not keys of its config, each as a function of the engine."""

AXES = {"data": "dp", "tensor": "tp", "model": "tp", "pipeline": "pp", "sequence": "cp"}
"""The axes of our mesh by the names that DeepSpeed's engine has for their ranks and sizes."""


def place(engine: Any, name: str) -> Callable[[], int] | None:
    """Return the engine's method `name` if it is one for this rank's place on an axis of the mesh, such as
    get_data_parallel_rank, or for the size of an axis, such as get_data_parallel_world_size; else None."""
    kind, _, what = name.removeprefix("get_").partition("_parallel_")
    if not name.startswith("get_") or kind not in AXES or what not in ("rank", "world_size"):
        return None
    axis = getattr(engine.polyreme.mesh, AXES[kind])
    return lambda: axis.rank if what == "rank" else axis.size


def getter(given: Translation, name: str) -> Callable[[], Any] | None:
    """Return the method `name` of an engine if it is one that returns a value of the config; else None."""
    if name in COMPUTED:
        return lambda: COMPUTED[name](given)
    paths = [ALIASES.get(name, ""), name]
    for prefix, sections in PREFIXES.items():
        if name.startswith(prefix):
            paths += [section + name.removeprefix(prefix) for section in sections]
    path = next((path for path in paths if path in given.values), None)
    return None if path is None else lambda: given.values[path]
