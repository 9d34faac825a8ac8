"""The table of DeepSpeed's configuration: every key of version 0.19.8, what it takes, DeepSpeed's default,
and what becomes of it here. The documentation's table is made of it (`markdown`).

Invariant: no key is without an outcome: it is translated into keys of ours, kept for the engine of this door,
accepted because nothing is to be done, warned about because something differs, or refused.

`python -m polyreme.compat.deepspeed.config_keys docs/from-deepspeed.md` writes the table into that page
again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["translated", "kept", "nothing to do", "warned", "refused"]
Takes = (
    Literal[
        "bool", "integer", "positive integer", "count", "number", "number >= 0", "fraction", "text", "list",
        "table", "anything",
    ]
    | tuple[object, ...]
)  # fmt: skip
"""The values that a key takes: a kind of value ("count" is an integer of at least 0), or the values
themselves. A key whose default is null takes null, too."""

BEGIN = "<!-- keys: begin, written by python -m polyreme.compat.deepspeed.config_keys -->"
END = "<!-- keys: end -->"


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's config.

    path: its sections and its name, with dots between; the name may be `*`, for any. to: the keys of
    Polyreme's that it decides. says: what is kept, why nothing is to be done, what differs, or why it is
    refused. fix: what to write instead. but: values that change nothing, for which there is no warning or
    refusal. auto: an "auto" that nobody has replaced stands for the default. aka: other names of the key."""

    path: str
    takes: Takes
    default: Any
    outcome: Outcome
    says: str = ""
    fix: str = ""
    to: tuple[str, ...] = ()
    but: tuple[Any, ...] = ()
    auto: bool = False
    aka: tuple[str, ...] = ()


def to(takes: Takes, default: Any, *ours: str, says: str = "") -> Key:
    """Return a key that becomes keys of Polyreme's."""
    return Key("", takes, default, "translated", says, to=ours)


def kept(takes: Takes, default: Any, says: str) -> Key:
    """Return a key that DeepSpeedEngine itself follows."""
    return Key("", takes, default, "kept", says)


def idle(takes: Takes, default: Any, says: str) -> Key:
    """Return a key for which nothing is to be done."""
    return Key("", takes, default, "nothing to do", says)


def warned(takes: Takes, default: Any, says: str, *but: Any) -> Key:
    """Return a key that is not followed, with a warning unless its value is the default or one of `but`."""
    return Key("", takes, default, "warned", says, but=but or (default,))


def refused(takes: Takes, default: Any, says: str, fix: str, *but: Any) -> Key:
    """Return a key that is refused, unless its value is the default or one of `but`."""
    return Key("", takes, default, "refused", says, fix, but=but or (default,))


def removed(says: str, fix: str) -> Key:
    """Return a key that DeepSpeed itself no longer takes, and that is refused with any value."""
    return Key("", "anything", None, "refused", f"DeepSpeed 0.19 has removed it: {says}", fix)


def aka(key: Key, *names: str) -> Key:
    return replace(key, aka=names)


def each(names: str, takes: Takes, default: Any, says: str) -> dict[str, Key]:
    """Return several keys for which nothing is to be done, all for the same reason."""
    return {name: idle(takes, default, says) for name in names.split()}


BATCH = "the third of the three follows from two"
DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "half", "float",
          "torch.float32", "torch.float16", "torch.bfloat16")  # fmt: skip
OWN_BUFFERS = "buckets of blocks have their own sizes (`zero.bucket_size`)"
OWN_GATHERS = "blocks are gathered whole, `zero.prefetch` ahead, and released after use"
OWN_FILES = "files of a tier are read ahead and written behind as the disk allows"
ELASTIC = "every checkpoint loads on any number of ranks, at any stage"
FP32_MASTER = (
    "the optimizer's copy of the weights stays fp32, which is more exact and takes 2 bytes a number more"
)
WHOLE = "numbers travel as they are, which is more exact and more bytes"
NO_EXPERTS = "there is no expert parallelism"
WHOLE_SEQUENCES = "scripts cut sequences for it themselves, and the engine cuts whole ones"
MESH_CP = (
    "write 1, and mesh.cp in a config of polyreme.initialize, PolyremeTrainer or "
    "polyreme.integrations.accelerate"
)
ZENFLOW = "updates of the less important gradients are not put off"

TOP: dict[str, Key] = {
    "train_batch_size": to("positive integer", None, "batch.size", says=BATCH),
    "train_micro_batch_size_per_gpu": to("positive integer", None, "batch.micro", says=BATCH),
    "gradient_accumulation_steps": to("positive integer", None, "batch.size", "batch.micro", says=BATCH),
    "managed_gradient_accumulation": kept("bool", True, "false: the script decides when a step is made"),
    "steps_per_print": kept("number >= 0", None, "a line in the log every so many steps"),
    "gradient_clipping": to("number >= 0", 1.0, "optimizer.clip", says="0 clips nothing, 1 is the default"),
    "communication_data_type": to(("fp16", "bf16", "fp32"), None, "precision.reduce",
                                  says="one narrower than the gradients is warned about; by default sums are "
                                       "fp32, while gradients travel as they were made where they can"),
    "seq_parallel_communication_data_type": idle(("fp16", "bf16", "fp32"), "fp32",
                                                 "no script's parts of sequences are exchanged"),
    **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor"), idle(
        "anything", None, "the mean over ranks is the same, and its sum is made in `precision.reduce`, which "
                          "does not overflow")),
    "gradient_allreduce_op": refused(("mean", "sum"), "mean", "gradients are the mean over ranks",
                                     "remove it, and multiply the loss by the number of data-parallel ranks"),
    "disable_allgather": idle("bool", False, "DeepSpeed reads it nowhere, either"),
    "allgather_size": idle("number", 5e8, OWN_BUFFERS),
    "dump_state": warned("bool", False, "nothing is dumped: `polyreme inspect` shows what a config came to"),
    "disable_python_gc": warned("bool", False, "Python's garbage collector is left alone: call gc.disable()"),
    "vocabulary_size": idle("count", None, "DeepSpeed only warns of one that is no multiple of 8"),
    "wall_clock_breakdown": kept("bool", False, "times of forward, backward and step in the log"),
    "memory_breakdown": warned("bool", False, "no lines about memory: `engine.memory()` tells about it"),
    "dataloader_drop_last": kept("bool", False, "the loader leaves a smaller last batch out"),
    "zero_allow_untested_optimizer": kept(
        "bool", False, "ZeRO refuses optimizers without it that DeepSpeed has not tried, as DeepSpeed does"
    ),
    "zero_force_ds_cpu_optimizer": idle("bool", True, "any torch optimizer updates what is off the device"),
    "use_data_before_expert_parallelism": refused("bool", False, NO_EXPERTS, "remove it"),
    "log_level": kept("anything", None, "the level of `deepspeed.utils.logger`"),
    "sequence_parallel_size": refused("positive integer", 1, WHOLE_SEQUENCES, MESH_CP),
    "data_parallel_size": to("positive integer", None, "mesh.dp"),
    "datastates_ckpt": refused("anything", None, "DataStates is another writer of checkpoints",
                               "remove it; checkpoint.writer.decoupled writes beside training", None, False),
    "weight_quantization": refused("anything", None, "it quantises the weights of a model that is only run",
                                   "remove it", None, {}),
    "msamp": refused("anything", None, "MS-AMP's fp8 formats are not here", "remove it, use bf16", None, {}),
    "nebula": removed("a service's checkpoints", "remove it: checkpoints go to the folder that is named"),
    "compression_training": removed("it pruned and quantised while training", "remove it"),
    "amp": removed("it was NVIDIA Apex", "use fp16, bf16 or torch_autocast"),
    "quantize_training": removed("mixture of quantisation", "remove it"),
    "sparse_gradients": removed("sparse sums of dense gradients", "remove it"),
    "eigenvalue": removed("a part of mixture of quantisation", "remove it"),
    "sparse_attention": removed("attention belongs to the model", "remove it, and choose it in the model"),
    "elasticity": removed("batch sizes for changing numbers of ranks",
                          "give train_batch_size and train_micro_batch_size_per_gpu"),
    "graph_harvesting": removed("CUDA graphs of the optimizer", "remove it"),
    "curriculum_learning": removed("the older of two curricula", "remove it, and order the data in the "
                                                                 "loader"),
    "progressive_layer_drop": removed("layers left out at random", "remove it"),
    "comms_config": warned("anything", None, "DeepSpeed reads no such key, nor is it read here: comms_logger "
                                             "counts calls"),
    "monitor_config": warned("anything", None, "DeepSpeed reads no such key, nor is it read here: "
                                               "csv_monitor, tensorboard and wandb stand at the top"),
    "_*": idle("anything", None, "a comment"),
}  # fmt: skip

NAMED: dict[str, Key] = {
    "optimizer.type": to("text", None, "optimizer.name", says="see [optimizers](#optimizers)"),
    "optimizer.params": to("table", {}, "optimizer.lr", "optimizer.betas", "optimizer.eps",
                           "optimizer.momentum", "optimizer.weight_decay", "optimizer.options",
                           says="those that are left out have DeepSpeed's defaults; weight decay is of all "
                                "parameters (`optimizer.no_decay = \"none\"`)"),
    "optimizer.torch_adam": idle("bool", False, "DeepSpeed reads it in optimizer.params alone"),
    "optimizer.legacy_fusion": idle("bool", False, "it chooses among loops with the same result"),
    "scheduler.type": kept("text", None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or "
                                         "a "
                                         "class of torch.optim.lr_scheduler; `--write` makes `lr_schedule` "
                                         "of "
                                         "the first three"),
    "scheduler.params": kept("table", {}, "its keyword arguments"),
}  # fmt: skip

PRECISION: dict[str, Key] = {
    "bf16.enabled": to("bool", False, "precision.compute"),
    "bf16.check_grad_overflow": to("bool", True, "precision.on_nonfinite",
                                   says="false: gradients with NaN and Inf are applied at stages 1 and 2"),
    "bf16.immediate_grad_update": idle("bool", False, "gradients are taken as they are made"),
    "bf16.bf16_master_weights_and_grads": warned("bool", False, FP32_MASTER),
    "bf16.bf16_optimizer_states": to("bool", False, "optimizer.states", says="rounded at random"),
    "fp16.enabled": to("bool", False, "precision.compute"),
    "fp16.auto_cast": idle("bool", False, "floating-point inputs are always cast"),
    "fp16.loss_scale": to("number >= 0", 0, "precision.loss_scale", says="0 is dynamic"),
    "fp16.initial_scale_power": to("count", 16, "precision.initial_scale", says="2 to its power"),
    "fp16.loss_scale_window": to("integer", 1000, "precision.growth_interval"),
    "fp16.hysteresis": to("positive integer", 2, "precision.hysteresis"),
    "fp16.consecutive_hysteresis": to("bool", False, "precision.consecutive_hysteresis"),
    "fp16.min_loss_scale": to("number >= 0", 1, "precision.min_scale"),
    "fp16.fp16_master_weights_and_grads": warned("bool", False, FP32_MASTER),
    "torch_autocast.enabled": to("bool", False, "precision.compute",
                                 says="autocast-bf16 or autocast-fp16; beside bf16 or fp16 it is kept, for "
                                      "forwards"),
    "torch_autocast.dtype": to(DTYPES, None, "precision.compute",
                               says="bfloat16 where it is left out; float16 with a dynamic loss scale; "
                                    "fp32 is refused"),
    "torch_autocast.lower_precision_safe_modules": idle(
        "list", None, "it chooses whose gradients travel in fewer bits: all travel in fp32, and torch "
                      "chooses what computes in them"),
    "data_types.grad_accum_dtype": to(DTYPES, None, "precision.reduce", says="as communication_data_type"),
    "data_types.param_dtype": idle(DTYPES, None, "it must be what bf16 or fp16 says, as with DeepSpeed"),
    "data_types.buffer_dtype": warned(DTYPES, None, "buffers stay in the format that the model gave them"),
    "data_types.keep_in_fp32_modules": idle("anything", "auto", "no buffer is cast"),
}  # fmt: skip

ZERO: dict[str, Key] = {
    "stage": to((0, 1, 2, 3), 0, "zero.stage"),
    "contiguous_gradients": idle("bool", True, "gradients are always in flat buffers"),
    "reduce_scatter": idle("bool", True, "gradients are always reduce-scattered"),
    "reduce_bucket_size": idle("positive integer", 500_000_000, OWN_BUFFERS),
    "use_multi_rank_bucket_allreduce": idle("bool", True, "every bucket is a bucket of all ranks"),
    "allgather_partitions": idle("bool", True, "parameters are always all-gathered"),
    "allgather_bucket_size": idle("count", 500_000_000, OWN_BUFFERS),
    "overlap_comm": idle("bool", None, "gradients are always reduced during backward"),
    "compute_grad_norm": idle("bool", True, "the norm comes with the step's one small sum"),
    "load_from_fp32_weights": warned("bool", True, "checkpoints have fp32 weights, and these are loaded"),
    "elastic_checkpoint": idle("bool", False, ELASTIC),
    "sub_group_size": idle("count", 1_000_000_000, "updates run bucket by bucket"),
    "cpu_offload": to("bool", None, "memory.states", says="old name of offload_optimizer"),
    "cpu_offload_param": to("bool", None, "memory.params", says="old name of offload_param"),
    "cpu_offload_use_pin_memory": idle("bool", None, "host memory is pinned where a device reads it"),
    "stage3_prefetch_bucket_size": aka(idle("count", 50_000_000, OWN_GATHERS), "prefetch_bucket_size"),
    "stage3_param_persistence_threshold": aka(to("count", 100_000, "zero.persistence_threshold"),
                                              "param_persistence_threshold"),
    "stage3_model_persistence_threshold": aka(
        warned("count", sys.maxsize, "parameters that stay whole are chosen by their own sizes alone"),
        "model_persistence_threshold"),
    "stage3_max_live_parameters": aka(idle("count", 1_000_000_000, OWN_GATHERS), "max_live_parameters"),
    "stage3_max_reuse_distance": aka(idle("count", 1_000_000_000, OWN_GATHERS), "max_reuse_distance"),
    "stage3_gather_16bit_weights_on_model_save": aka(
        kept("bool", False, "whether `save_16bit_model` may gather the weights of stage 3"),
        "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    "stage3_module_granularity_threshold": aka(idle("integer", 0, OWN_GATHERS),
                                                "module_granularity_threshold"),
    "stage3_use_all_reduce_for_fetch_params": aka(idle("bool", False, OWN_GATHERS),
                                                  "use_all_reduce_for_fetch_params"),
    "stage3_allgather_sequential": aka(idle("bool", False, "gathers land where parameters are used"),
                                       "allgather_sequential"),
    "ignore_unused_parameters": kept("bool", True, "false: with states off the device, a parameter without "
                                     "a gradient in a window is an error at stages 1 and 2"),
    "legacy_stage1": refused("bool", False, "DeepSpeed 0.19 has removed it", "remove it"),
    "round_robin_gradients": idle("bool", False, "every rank has a part of every bucket"),
    "parameter_alignment": idle("bool", False, "parameters are always aligned (to 64 elements)"),
    "zero_hpz_partition_size": warned("count", 1, "parameters are sharded over all ranks, without a second "
                                      "copy on each host, so that gathers go between hosts; our configs have "
                                      "zero.shard_over for that", 0, 1),
    "zero_quantized_weights": warned("bool", False, WHOLE),
    "zero_quantized_nontrainable_weights": warned("bool", False, "frozen weights are kept as they are"),
    "zero_quantized_gradients": warned("bool", False, WHOLE),
    "memory_efficient_linear": idle("bool", True, "gathered weights are not kept for backward"),
    "pipeline_loading_checkpoint": idle("bool", False, "each rank reads its own parts of a checkpoint"),
    "override_module_apply": idle("bool", True, "weights are initialised before they are sharded"),
    "log_trace_cache_warnings": idle("bool", False, "there is no trace"),
    "enable_sanity_checks": idle("bool", False, "use of a released parameter is always an error"),
    "save_muon_momentum_buffer_in_memory": idle("bool", False, OWN_FILES),
    **each("leaf_module.classes leaf_module.names leaf_module.name_suffixes", "anything", None,
           "a block is gathered whole, whichever of its experts run"),
    "mics_shard_size": removed("sharding over some of the ranks",
                               "remove it, or write a config of ours, with zero.shard_over"),
    "mics_hierarchical_params_gather": removed("a part of MiCS", "remove it"),
    "zeropp_loco_param": removed("error feedback of quantised gradients", "remove it"),
    "offload_param.device": to(("none", "cpu", "nvme"), "none", "memory.params", says="at stage 3"),
    "offload_param.nvme_path": to("text", None, "memory.params", says="the folder"),
    "offload_param.buffer_count": idle("count", 5, OWN_FILES),
    "offload_param.buffer_size": idle("count", 100_000_000, OWN_FILES),
    "offload_param.max_in_cpu": idle("count", 1_000_000_000, OWN_FILES),
    "offload_param.pin_memory": idle("bool", True, "host memory is pinned where a device reads it"),
    "offload_optimizer.device": to(("none", "cpu", "nvme"), "none", "memory.states"),
    "offload_optimizer.nvme_path": to("text", None, "memory.states", says="the folder"),
    "offload_optimizer.ratio": to("fraction", 1.0, "memory.states", says="the rest stays on the device"),
    "offload_optimizer.pin_memory": idle("bool", True, "host memory is pinned where a device reads it"),
    **each("offload_optimizer.buffer_count", "count", 4, OWN_FILES),
    **each("offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init",
           "bool", False, OWN_FILES),
    "offload_optimizer.super_offload": idle("bool", False, "updates use the CPU as they can"),
    "offload_optimizer.cpuadam_cores_perc": idle("fraction", 0.8, "an update uses the rank's cores"),
    **dict.fromkeys(
        [f"zenflow.{name}" for name in (
            "topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload",
            "auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc", "steps_per_epoch")],
        Key("", "anything", None, "refused", ZENFLOW, "remove zenflow: every update is a whole one")),
}  # fmt: skip

COMPILE = ("deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
           "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
           "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
           "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes")  # fmt: skip
AUTOTUNING = ("fast results_dir exps_dir overwrite start_profile_step end_profile_step start_step end_step "
              "metric metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info "
              "model_info_path mp_size max_train_batch_size min_train_batch_size "
              "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
              "num_tuning_micro_batch_sizes")  # fmt: skip
EXPERTS = ("autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
           "moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm "
           "route_norm route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend "
           "comm_num_sm comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups "
           "score_func top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 "
           "num_experts_attr top_k_attr has_shared_experts shared_experts_pattern "
           "shared_experts_gate_pattern expert_activation")  # fmt: skip

SECTIONS: dict[str, dict[str, Key]] = {
    "zero_optimization": ZERO,
    "activation_checkpointing": {
        "partition_activations": warned("bool", False, "each tensor-parallel rank keeps its inputs whole"),
        "cpu_checkpointing": kept("bool", False, "`deepspeed.checkpointing` keeps inputs in host memory"),
        **each("contiguous_memory_optimization synchronize_checkpoint_boundary profile", "bool", False,
               "inputs of recomputed blocks are kept as they are"),
        "number_checkpoints": idle("count", None, "it sizes a buffer that is not needed"),
    },
    "pipeline": {
        "stages": idle("anything", "auto", "PipelineModule(num_stages=...) decides"),
        "partition": idle("text", "best", "PipelineModule(partition_method=...) decides"),
        "seed_layers": idle("bool", False, "PipelineModule(seed_layers=...) decides"),
        "activation_checkpoint_interval": kept("count", 0, "layers of a PipelineModule are recomputed"),
        "pipe_partitioned": idle("bool", True, "activations travel between stages as they are"),
        "grad_partitioned": idle("bool", True, "gradients travel between stages as they are"),
        "use_reentrant": idle("bool", True, "recomputation takes any inputs"),
    },
    "tensor_parallel": {
        "autotp_size": to("count", 0, "mesh.tp", says="0 is 1; train_batch_size counts these ranks as "
                                                      "DeepSpeed does, batch.size does not"),
        "dtype": idle("anything", None, "the model's format is what bf16 or fp16 says"),
        "tp_overlap_comm": idle("bool", False, "divided layers communicate in their own way"),
        "vocab_parallel_lm_head": idle("bool", None, "the vocabulary is divided where the model allows it"),
        "vocab_parallel_ce_backend": idle(("torch", "liger"), "torch", "a divided loss is ours"),
        "tp.tp_size": to("count", 1, "mesh.tp", says="must be autotp_size"),
        "tp.tp_grain_size": idle("count", 1, "layers are cut where their heads and columns allow it"),
        **dict.fromkeys(("tp.mpu", "tp.tp_group"), refused(
            "anything", None, "groups of ranks are made here", "remove it: autotp_size is enough")),
        "injection_policy_tuple": refused("anything", None, "layers are divided by a plan of names",
                                          "remove it, and write mesh.tp_plan in a config of ours"),
        "partition_config": refused("anything", None, "its patterns are of parameters' names and shapes",
                                    "remove it, and write mesh.tp_plan in a config of ours", None, {}),
        "preset_model": idle("text", None, "the model's own plan is followed"),
        "keep_module_on_host": idle("bool", False, "each rank holds its own parts only"),
        "replace_with_kernel_inject": aka(refused("bool", False, "it is for models that are only run",
                                                  "remove it"), "kernel_inject"),
    },
    "expert_parallel": {
        "enabled": refused("bool", False, NO_EXPERTS, "remove it: every rank has all experts"),
        **each(EXPERTS, "anything", None, "it counts with expert_parallel.enabled only"),
    },
    "checkpoint": {
        "tag_validation": kept(
            ("ignore", "warn", "fail"), "warn",
            "whether different tags of ranks are an error; else rank 0's counts for all"
        ),
        "load_universal": idle("bool", False, ELASTIC),
        "use_node_local_storage": warned("bool", False, "ranks write one folder, which all hosts must see"),
        "parallel_write.pipeline_stage": idle("bool", False, "every rank writes its own parts"),
        "checkpoint_serialization": idle("bool", True, "checkpoints are safetensors"),
        "writer.decoupled": idle("bool", False, "`save_checkpoint` returns when the checkpoint is whole"),
        **each("writer.type writer.io_buffer_size writer.io_buffer_double writer.show_statistics "
               "writer.data_parallel writer.io_multiplier", "anything", None,
               "every rank writes its own parts"),
    },
    "tensorboard": {
        "enabled": to("bool", False, "monitor.tensorboard", says="and kept for `deepspeed.monitor`"),
        "output_path": kept("text", "", "the folder"),
        "job_name": kept("text", "DeepSpeedJobName", "a folder in it"),
    },
    "wandb": {
        "enabled": to("bool", False, "monitor.wandb", says="and kept for `deepspeed.monitor`"),
        "project": to("text", "deepspeed", "monitor.project", says="and kept for `deepspeed.monitor`"),
        "group": kept("text", None, "of the run"),
        "team": kept("text", None, "of the run"),
    },
    "csv_monitor": {
        "enabled": kept("bool", False, "CSV files of `deepspeed.monitor`"),
        "output_path": kept("text", "", "the folder"),
        "job_name": kept("text", "DeepSpeedJobName", "a folder in it"),
    },
    "comet": {
        "enabled": refused("bool", False, "Comet is not among the services that are told",
                           "use tensorboard, wandb or csv_monitor"),
        **each("samples_log_interval project workspace api_key experiment_name experiment_key online mode",
               "anything", None, "it counts with comet.enabled only"),
    },
    "comms_logger": {
        "enabled": kept("bool", False, "calls of `deepspeed.comm` are counted"),
        "verbose": kept("bool", False, "and written to the log as they are made"),
        "prof_all": kept("bool", True, "all of them"),
        "prof_ops": kept("list", [], "or these"),
        "debug": kept("bool", False, "with the caller's name"),
    },
    "flops_profiler": {
        "enabled": kept("bool", False, "operations of one step, by module"),
        "recompute_fwd_factor": kept("number", 0.0, "of forwards in backward"),
        "profile_step": kept("count", 1, "the step"),
        "step": idle("count", None, "DeepSpeed reads profile_step"),
        "module_depth": kept("integer", -1, "how deep modules are shown"),
        "top_modules": kept("count", 1, "how many of each depth"),
        "detailed": kept("bool", True, "every module"),
        "output_file": kept("text", None, "where to"),
    },
    "timers": each("throughput.enabled throughput.synchronized", "bool", True,
                   "a step's time is measured without waiting for the device"),
    "aio": each("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds "
                "thread_count", "anything", None, OWN_FILES),
    "compile": {
        **each(COMPILE, "anything", None, "it is a part of DeepCompile"),
        "deepcompile": warned("bool", False, "`engine.compile()` compiles each block with torch.compile, and "
                                             "gathers are no part of its graph"),
        **dict.fromkeys(("disable", "enabled", "backend", "kwargs"), removed(
            "`engine.compile()` compiles", "remove it, and set torch_compile of TrainingArguments, or call "
                                           "engine.compile(backend)")),
    },
    "data_efficiency": {
        "enabled": refused("bool", False, "curricula and dropped tokens are not here",
                           "write false, and order the data in the loader"),
        **dict.fromkeys(
            ("data_sampling.enabled", "data_sampling.curriculum_learning.enabled",
             "data_sampling.dynamic_batching.enabled", "data_routing.enabled",
             "data_routing.random_ltd.enabled"),
            refused("bool", False, "curricula and dropped tokens are not here",
                    "write false, and order the data in the loader")),
        "seed": idle("integer", 1234, "it counts with data_efficiency.enabled only"),
        **each("data_sampling.* data_routing.*", "anything", None,
               "it counts with data_efficiency.enabled only"),
    },
    "autotuning": {
        "enabled": refused("bool", False, "it starts the script again and again with other settings",
                           "write false"),
        **each(AUTOTUNING, "anything", None, "it counts with autotuning.enabled only"),
    },
    "hybrid_engine": {
        "enabled": refused("bool", False, "there is one engine: generate with the model, inside "
                                          "deepspeed.zero.GatheredParameters at stage 3", "write false"),
        **each("max_out_tokens inference_tp_size release_inference_cache pin_parameters "
               "tp_gather_partition_size enable_cuda_graph", "anything", None,
               "it counts with hybrid_engine.enabled only"),
    },
}  # fmt: skip

LENIENT = ("zero_optimization", "bf16", "fp16", "tensor_parallel", "tensorboard", "wandb", "csv_monitor",
           "comet", "comms_logger", "timers", "compile", "hybrid_engine", "weight_quantization")  # fmt: skip
"""The sections in which DeepSpeed takes an "auto" that nobody has replaced for the default."""
OLD_SECTIONS = {"bfloat16": "bf16", "tensor_parallel.tensor_parallel": "tensor_parallel.tp"}
"""The path of each section that DeepSpeed also takes under another one, by that other path."""


def _table() -> Iterator[Key]:
    for path, key in {**TOP, **NAMED, **PRECISION}.items():
        yield replace(key, path=path, auto=path.partition(".")[0] in LENIENT)
    for section, keys in SECTIONS.items():
        for name, key in keys.items():
            yield replace(key, path=f"{section}.{name}", auto=section in LENIENT)


KEYS: dict[str, Key] = {key.path: key for key in _table()}
"""Every key by its path."""
NAMES: dict[str, str] = {
    f"{path.rpartition('.')[0]}.{name}": path for path, key in KEYS.items() for name in key.aka
}
"""The path of each key that has other names, by its path with each of these."""
TABLES: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for parts in (path.split(".") for path in KEYS) for depth in range(1, len(parts))
)
"""The paths of all sections."""


def find(path: str) -> Key | None:
    """Return the key of this path, which may have another of the key's names; None if there is none."""
    if path in KEYS or path in NAMES:
        return KEYS[NAMES.get(path, path)]
    if path.startswith("_"):
        return KEYS["_*"]
    parts = path.split(".")
    wild = (KEYS.get(".".join([*parts[:depth], "*"])) for depth in range(len(parts) - 1, 0, -1))
    return next((key for key in wild if key), None)


def in_words(key: Key) -> str:
    """Return the values that a key takes, in words."""
    if not isinstance(key.takes, str):
        return ", ".join(str(value) for value in key.takes)
    return key.takes.replace("count", "integer >= 0")


def becomes(key: Key) -> str:
    """Return, in Markdown, what becomes of a key."""
    if key.outcome == "translated":
        return ", ".join(f"`{name}`" for name in key.to) + (f": {key.says}" if key.says else "")
    unless = f" unless {json.dumps(key.but[0])}" if key.but else ""
    return f"{key.outcome}{unless}: {key.says}" + (f"; {key.fix}" if key.outcome == "refused" else "")


HEADINGS: dict[str, tuple[Outcome, ...]] = {
    "To change: refused, with what to write instead": ("refused",),
    "To know: taken with a warning, as something differs": ("warned",),
    "Nothing to do: followed": ("translated", "kept"),
    "Nothing to do: without an effect here": ("nothing to do",),
}
"""The parts of the documentation's table, by what users have to do, and the outcomes in each."""


def markdown() -> str:
    """Return the table of all keys in Markdown: a folded table for each part, in which neighbours with the
    same answer share a line."""
    lines = []
    for title, outcomes in HEADINGS.items():
        keys = [key for key in KEYS.values() if key.outcome in outcomes]
        lines += [
            '<details markdown="1">',
            f"<summary>{title} ({len(keys)} keys)</summary>",
            "",
            "| key | takes | what becomes of it |",
            "|---|---|---|",
        ]
        for (takes, answer), alike in groupby(keys, lambda key: (in_words(key), becomes(key))):
            names = ", ".join(
                f"`{name}`"
                for key in alike
                for name in (key.path, *(f"{key.path.rpartition('.')[0]}.{other}" for other in key.aka))
            )
            lines.append(
                "| " + " | ".join(cell.replace("|", r"\|") for cell in (names, takes, answer)) + " |"
            )
        lines += ["", "</details>", ""]
    return "\n".join(lines[:-1])


def with_table(page: str) -> str:
    """Return `page` with the table between its two marks written anew."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_table(target.read_text(encoding="utf-8")), encoding="utf-8")
