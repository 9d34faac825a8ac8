"""The package `deepspeed.zero`, whose names are Polyreme's own underneath."""

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from polyreme.compat.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

__getattr__ = lazily(__name__, dict.fromkeys(("TiledLinear", "TiledLinearReturnBias"), "tiling"))
