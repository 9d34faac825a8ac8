"""Two tables of names: further paths of modules in this package, and parts of DeepSpeed that it does not
have, with the reason and what to do instead. `polyreme.compat.finder` makes modules of the rows.

Invariant: a row costs nothing until its name is looked up. A refused name can be imported as any other;
calling it, or making an object of it, raises UnsupportedError."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyreme.compat.deepspeed.refusal import absent

SAME = {
    "accelerator.abstract_accelerator": "accelerator",
    "accelerator.cpu_accelerator": "accelerator",
    "accelerator.cuda_accelerator": "accelerator",
    "accelerator.real_accelerator": "accelerator",
    "comm.comm": "comm",
    "comm.config": "monitor.config",
    "comm.constants": "comm",
    "comm.reduce_op": "comm",
    "comm.torch": "comm.coalesced",
    "comm.utils": "comm",
    "monitor.csv_monitor": "monitor.monitor",
    "monitor.tensorboard": "monitor.monitor",
    "monitor.wandb": "monitor.monitor",
    "ops.adagrad": "ops.optimizers",
    "ops.adagrad.cpu_adagrad": "ops.optimizers",
    "ops.adam": "ops.optimizers",
    "ops.adam.cpu_adam": "ops.optimizers",
    "ops.adam.fused_adam": "ops.optimizers",
    "ops.aio": "ops.op_builder",
    "ops.lamb": "ops.optimizers",
    "ops.lamb.fused_lamb": "ops.optimizers",
    "ops.lion": "ops.optimizers",
    "ops.lion.cpu_lion": "ops.optimizers",
    "ops.lion.fused_lion": "ops.optimizers",
    "ops.op_builder.all_ops": "ops.op_builder",
    "ops.op_builder.builder": "ops.op_builder",
    "profiling.flops_profiler.profiler": "profiling.flops_profiler",
    "runtime.bf16_optimizer": "runtime.fp16.fused_optimizer",
    "runtime.comm.coalesced_collectives": "comm.coalesced",
    "runtime.fp16.unfused_optimizer": "runtime.fp16.fused_optimizer",
    "runtime.swap_tensor": "runtime.zero.offload_config",
    "utils.bwc": "utils.groups",
    "utils.exceptions": "utils.helpers",
    "utils.module_utils": "utils.helpers",
    "utils.nvtx": "utils.helpers",
    "utils.torch": "utils.helpers",
}
"""Paths of modules in DeepSpeed, and the module of this package that is found at each."""


class Refusal(NamedTuple):
    """The reason why a part of DeepSpeed is missing, what to do instead, and where DeepSpeed has it: paths of
    modules, which stand for all modules inside them, too, or names in modules that exist here ("module:name
    name")."""

    reason: str
    fix: str
    places: tuple[str, ...]


REFUSED = (
    Refusal(
        "Polyreme has no experts that are divided between ranks yet",
        "use the model's own layer of experts, which trains as any other layer does",
        ("moe.layer", "moe.experts", "moe.mappings", "moe.sharded_moe",
         "utils.groups:_create_expert_and_data_parallel _create_expert_data_and_model_parallel "
         "_get_expert_parallel_group _get_expert_parallel_group_ranks _get_expert_parallel_world_size "
         "_get_expert_parallel_rank _get_expert_parallel_src_rank _get_expert_broadcast_src_rank "
         "_get_expert_data_parallel_group _get_expert_data_parallel_group_ranks "
         "_get_expert_data_parallel_world_size _get_expert_data_parallel_rank "
         "_get_expert_parallel_group_dict _get_expert_data_parallel_group_dict "
         "_get_expert_model_parallel_world_size _get_max_expert_size _get_max_expert_size_name "
         "_get_max_expert_parallel_group _get_local_all_to_all_group"),
    ),
    Refusal(
        "scripts cut sequences for it themselves, and Polyreme's engine cuts whole ones",
        "set sequence_parallel_size (sp_size) to 1, and mesh.cp in a config of polyreme.initialize, "
        "PolyremeTrainer or polyreme.integrations.accelerate",
        ("sequence", "runtime.sequence_parallel"),
    ),
    Refusal(
        "layers, adapters and quantised weights are those of torch and of other libraries",
        "use torch.nn.Linear, and wrap the model by peft, whose adapters train on shards at every ZeRO stage",
        ("linear",),
    ),
    Refusal(
        "ZeRO 3 gathers a layer whole",
        "use torch.nn.Linear, or divide the layer over ranks: tensor_parallel.autotp_size in the config",
        ("runtime.zero.tiling",),
    ),
    Refusal(
        "a model keeps its own layers",
        "leave it out; tensor_parallel.autotp_size in the config divides the model's layers over ranks",
        ("module_inject", "ops.transformer", "ops:DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    ),
    Refusal(
        "no schedule has two stages in a V on each rank",
        "use PipelineModule",
        ("pipe:DualPipeVModule", "runtime.pipe.dualpipev", "runtime.pipe.schedule:DualPipeVSchedule"),
    ),
    Refusal(
        "a schedule is a section of the config or an object, and no arguments of the command line",
        'write "scheduler" in the config, or pass lr_scheduler= to deepspeed.initialize',
        ("runtime.lr_schedules:add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config "
         "override_params override_lr_range_test_params override_1cycle_params override_warmupLR_params "
         "override_warmupCosineLR_params",),
    ),
    Refusal(
        "the engine has no such meter",
        'take SynchronizedWallClockTimer, or write "wall_clock_breakdown": true in the config',
        ("utils.timer:ThroughputTimer",),
    ),
    Refusal(
        "torch and Python's loggers do it",
        "call parameter.register_post_accumulate_grad_hook, torch.compile or logger.isEnabledFor",
        ("utils.helpers:register_grad_hook jit_script_compat",
         "utils.logging:get_current_level should_log_le"),
    ),
    Refusal(
        "the engine sends what stages hand on, whole tensors",
        "call deepspeed.comm.send and recv with the ranks of engine.grid.pipe_groups",
        ("runtime.pipe.p2p", "runtime.utils:PartitionedTensor"),
    ),
    Refusal(
        "torch's own functions, and deepspeed.accelerator's, do it",
        "call them in the script: each is a line or two of them",
        ("runtime.utils:get_only_unique_item copy_to_device combine_grad_norm_groups get_ma_status "
         "get_flattened_grad_norm memory_status noop_decorator",),
    ),
    Refusal(
        "an engine's checkpoint is a Hugging Face directory, which it writes itself",
        "call engine.save_checkpoint, or torch.save",
        ("runtime.checkpoint_engine",),
    ),
    Refusal(
        "all parameters and gradients travel in the format that they have",
        'write {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}} in the config',
        ("runtime.torch_autocast:init_autocast_params get_comm_dtype has_comm_dtype",),
    ),
    Refusal(
        "attention belongs to the model",
        'leave it out, and choose it in the model: attn_implementation="sdpa" or "flash_attention_2"',
        ("ops.sparse_attention",),
    ),
    Refusal(
        "Polyreme trains, and serves no models",
        "call the model itself",
        ("inference", "model_implementations", "utils.types"),
    ),
    Refusal(
        "a model keeps its own layers, which generate, too",
        "call engine.module.generate inside of deepspeed.zero.GatheredParameters",
        ("runtime.hybrid_engine", "runtime.rollout"),
    ),
    Refusal(
        "files of Megatron-LM, which are pickled, are not read",
        "convert the checkpoint to Hugging Face's form, and load the model from it",
        ("runtime.state_dict_factory",),
    ),
    Refusal(
        "gradients travel as numbers of their own format, dense or as torch's sparse tensors",
        "leave it out; communication_data_type in the config says which format gradients are summed in",
        ("runtime.sparse_tensor", "runtime.csr_tensor", "runtime.fp16.onebit", "runtime.comm",
         "comm.coalesced:all_to_all_quant_reduce all_to_all_loco_quant_reduce"),
    ),
    Refusal(
        "a model is compiled by torch.compile",
        "call engine.compile(), or torch.compile on the model's blocks",
        ("compile", "runtime.compiler"),
    ),
    Refusal(
        "models are not pruned or quantised as they train",
        "leave it out, and quantise the trained model: polyreme's checkpoints are Hugging Face's",
        ("compression",),
    ),
    Refusal(
        "the order of samples and what a layer sees of them are the script's",
        "give the engine's loader a sampler or a dataset that is ordered",
        ("runtime.data_pipeline", "runtime.progressive_layer_drop", "runtime.eigenvalue"),
    ),
    Refusal(
        "checkpoints go on with any number of ranks",
        "start again with as many ranks as there are; the config's batch size stays what it is",
        ("elasticity",),
    ),
    Refusal(
        "Comet is not among the services that are told",
        "use tensorboard, wandb or csv_monitor",
        ("monitor.comet",),
    ),
    Refusal(
        "ranks of several hosts are started over ssh, and by MPI without a helper",
        "run `polyreme deepspeed --launcher ...`, or call deepspeed.launcher.runner.main",
        ("launcher.launcher_helper",),
    ),
    Refusal(
        "deepspeed.comm has torch's functions themselves, and no object in between",
        "call the functions of deepspeed.comm or torch.distributed",
        ("comm.coalesced:TorchBackend Noop StagedWork disable_compiler_collective build_shm_op stage_on_cpu "
         "has_coalescing_manager has_all_reduce_coalesced get_coalescing_manager all_gather_comm_off "
         "reduce_scatter_comm_off broadcast_comm_off all_reduce_comm_off reduce_comm_off backward_comm_off",),
    ),
    Refusal(
        "each rank keeps itself on its cores, without numactl",
        "run `polyreme deepspeed --bind_cores_to_rank ...`",
        ("utils.numa:get_numactl_cmd get_numa_cores parse_range",),
    ),
    Refusal(
        "no trainings are run to compare settings",
        "ask `polyreme plan`, or compare runs with other values of zero_optimization.stage",
        ("autotuning",),
    ),
)  # fmt: skip


def refusal_of(path: str, name: str = "") -> Refusal | None:
    """Return the row that refuses the module `path`, or the `name` in one that is here; None without one."""
    for row in REFUSED:
        for place in row.places:
            module, _, names = place.partition(":")
            if name in names.split() if path == module and names else f"{path}.".startswith(f"{place}."):
                return row
    return None


def refused_name(path: str, name: str) -> Any:
    """Return a class in place of a name of the module `path` that the table refuses; None for others."""
    row = None if name.startswith("__") else refusal_of(path, name)
    return None if row is None else absent(f"deepspeed.{path}.{name}", row.reason, row.fix)


def has_below(path: str) -> bool:
    """Return whether the tables have modules inside this one, or inside it at another of its paths."""
    paths = [path, *(other for other, module in SAME.items() if module == path)]
    return refusal_of(path) is not None or any(row.startswith(f"{each}.") for row in SAME for each in paths)
