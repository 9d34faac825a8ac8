"""What the engine's getters of the config (`engine.zero_reduce_bucket_size()`) return: the value of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES = {
    "autotp_size": "tensor_parallel.autotp_size",
    "bfloat16_enabled": "bf16.enabled",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_optimization_stage": "zero_optimization.stage",
}
PREFIXES = {"zero_": "zero_optimization.", "flops_profiler_": "flops_profiler."}


def path_of(values: Mapping[str, Any], name: str) -> str | None:
    """The key of the config, by its path, that the getter `name` tells; None where it is none."""
    found = [ALIASES.get(name, ""), name]
    found += [path + name.removeprefix(prefix) for prefix, path in PREFIXES.items() if name.startswith(prefix)]
    return next((path for path in found if path in values), None)
