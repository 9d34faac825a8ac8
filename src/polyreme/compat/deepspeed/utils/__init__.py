"""DeepSpeed's `utils`: logging, groups of ranks, timers, and marks on modules."""

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.runtime.dataloader import RepeatingLoader
from polyreme.compat.deepspeed.utils import groups
from polyreme.compat.deepspeed.utils.comms_logging import get_caller_func
from polyreme.compat.deepspeed.utils.groups import *  # noqa: F403
from polyreme.compat.deepspeed.utils.init_on_device import OnDevice
from polyreme.compat.deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from polyreme.compat.deepspeed.utils.module_utils import recursive_getattr, recursive_setattr
from polyreme.compat.deepspeed.utils.nvtx import instrument_w_nvtx
from polyreme.compat.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from polyreme.compat.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_caller_func",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "log_dist",
    "log_dist_once",
    "logger",
    "recursive_getattr",
    "recursive_setattr",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

__getattr__ = lazily(__name__)
