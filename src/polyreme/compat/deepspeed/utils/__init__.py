"""The package `deepspeed.utils`: logging, groups of ranks, timers, single parameters, and marks on
modules."""

from importlib import import_module

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.runtime.dataloader import RepeatingLoader as RepeatingLoader
from polyreme.compat.deepspeed.utils import groups as groups
from polyreme.compat.deepspeed.utils.groups import *  # noqa: F403

_NAMES = {
    "comms_logging": "get_caller_func",
    "helpers": "instrument_w_nvtx recursive_getattr recursive_setattr",
    "init_on_device": "OnDevice",
    "logging": "log_dist log_dist_once logger set_log_level_from_string",
    "tensor_fragment": """
        safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
        safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
        safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        safe_set_local_optimizer_state safe_update_full_grad_vectorized""",
    "z3_leaf_module": """
        get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
        set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter""",
}
"""Names of this package's modules that scripts import from the package."""
for _module, _names in _NAMES.items():
    _found = import_module(f"{__name__}.{_module}")
    globals().update({name: getattr(_found, name) for name in _names.split()})

__getattr__ = lazily(__name__)
