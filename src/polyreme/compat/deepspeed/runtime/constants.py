"""DeepSpeed's constants for the keys of a config and their defaults: FP16_LOSS_SCALE is "loss_scale", and
FP16_LOSS_SCALE_DEFAULT is 0. They are made of the table of keys; those that no key gives are listed here."""

from typing import TYPE_CHECKING, Any

from polyreme.compat.deepspeed.config_keys import KEYS

_PREFIXES = {
    "": "", "bf16": "BFLOAT16_", "fp16": "FP16_", "torch_autocast": "TORCH_AUTOCAST_", "data_types": ""
}  # fmt: skip
"""The beginning of the constants' names, by the section of their keys."""
_MODES = ("WARN", "IGNORE", "FAIL")


class ValidationMode:
    """The values of checkpoint.tag_validation: what is done if ranks save under different tags."""

    WARN, IGNORE, FAIL = _MODES


for _path, _key in KEYS.items():
    _section, _, _name = _path.rpartition(".")
    if _section in _PREFIXES and _name.isidentifier():
        _constant = _PREFIXES[_section] + _name.upper()
        globals().update({_constant: _name, f"{_constant}_DEFAULT": _key.default})

globals().update(
    **{f"ROUTE_{each.upper()}": each for each in ("train", "eval", "predict", "encode")},
    **{each.upper(): each for each in ("optimizer", "scheduler", "type", "fp16", "torch_autocast",
                                       "data_types", "checkpoint", "data_parallel_group", "global_rank",
                                       "max_grad_norm", "check_overflow", "legacy_fusion")},
    **dict.fromkeys(("OPTIMIZER_TYPE_DEFAULT", "SCHEDULER_TYPE_DEFAULT")),
    **dict.fromkeys(("OPTIMIZER_PARAMS", "SCHEDULER_PARAMS"), "params"),
    **dict.fromkeys(("LEGACY_FUSION_DEFAULT", "BFLOAT16_CHECK_OVERFLOW_DEFAULT",
                     "BFLOAT16_MASTER_WEIGHTS_AND_GRADS_DEFAULT", "BFLOAT16_OPTIMIZER_STATES_DEFAULT",
                     "FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT", "PRESCALE_GRADIENTS_DEFAULT",
                     "LOAD_UNIVERSAL_CHECKPOINT_DEFAULT", "USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT",
                     "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT",
                     "USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT"), False),
    BFLOAT16="bf16",
    BFLOAT16_OLD="bfloat16",
    DDP_BFLOAT16="ddp_bf16",
    BFLOAT16_IMMEDIATE_GRAD_UPDATE_DEFAULT=True,
    BFLOAT16_MASTER_WEIGHTS_AND_GRADS="bf16_master_weights_and_grads",
    BFLOAT16_OPTIMIZER_STATES="bf16_optimizer_states",
    FP16_MASTER_WEIGHTS_AND_GRADS="fp16_master_weights_and_grads",
    GRADIENT_PREDIVIDE_FACTOR_DEFAULT=1.0,
    GRADIENT_ALLREDUCE_OP_MEAN="mean",
    GRADIENT_ALLREDUCE_OP_SUM="sum",
    GRADIENT_ALLREDUCE_OP_SUPPORTED=("mean", "sum"),
    CHECKPOINT_TAG_VALIDATION="tag_validation",
    CHECKPOINT_TAG_VALIDATION_DEFAULT=ValidationMode.WARN,
    CHECKPOINT_TAG_VALIDATION_MODES=[*_MODES],
    LOAD_UNIVERSAL_CHECKPOINT="load_universal",
    USE_NODE_LOCAL_STORAGE_CHECKPOINT="use_node_local_storage",
    CHECKPOINT_PARALLEL_WRITE="parallel_write",
    CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE="pipeline_stage",
    PIPE_REPLICATED="ds_pipe_replicated",
    USE_DATA_BEFORE_EXPERT_PARALLEL="use_data_before_expert_parallelism",
)  # fmt: skip

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
