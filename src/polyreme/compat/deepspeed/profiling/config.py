"""The section flops_profiler of a config as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyreme.compat.deepspeed.config_keys import KEYS

FLOPS_PROFILER = "flops_profiler"


class DeepSpeedFlopsProfilerConfig:
    """Every key of the section is an attribute."""

    enabled: bool
    recompute_fwd_factor: float
    profile_step: int
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | None

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = param_dict.get(FLOPS_PROFILER) or {}
        for name in type(self).__annotations__:
            setattr(self, name, section.get(name, KEYS[f"{FLOPS_PROFILER}.{name}"].default))
