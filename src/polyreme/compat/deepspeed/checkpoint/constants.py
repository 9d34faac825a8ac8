"""DeepSpeed's constants for the names in its checkpoints, for scripts that look into them or add to the
client state. Most are the constant's own name in small letters."""

from typing import TYPE_CHECKING, Any

_ALIKE = """
optimizer_state_dict fp32_groups fp32_flat_groups base_optimizer_state single_partition_of_fp32_groups
param_groups group_paddings partition_count zero_stage clip_grad loss_scaler param param_shapes buffer_names
frozen_param_shapes frozen_param_fragments ds_version universal_checkpoint_info vocabulary_parameter_patterns
pipeline_replicated_parameter_patterns parameter_to_average_patterns parameter_with_row_parallelism_patterns
tp_replicated_parameter_patterns parameter_with_2_sub_params_cat_dim_0 parameter_with_sub_params
"""
globals().update({name.upper(): name for name in _ALIKE.split()})
FP32_WEIGHT_KEY = "fp32"
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"
BF16_ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX = f"bf16_{ZERO_FILE_PREFIX}", f"fp16_{ZERO_FILE_PREFIX}"
LAYER_FILE_PREFIX = "layer_"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
