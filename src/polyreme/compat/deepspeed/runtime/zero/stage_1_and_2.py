"""DeepSpeed's names of ZeRO stages 1 and 2: estimates of their memory, and their optimizer's class."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import Wrapper
from polyreme.compat.deepspeed.runtime.zero import estimates

estimate_zero2_model_states_mem_needs = estimates.zero2
model_to_params = estimates.parameters


def estimate_zero2_model_states_mem_needs_all_cold(total_params: int, *machine: Any, **more: Any) -> None:
    """Print the estimates for a model of `total_params` parameters, with its optimizer on the host and on the
    GPU."""
    estimates.show(total_params, None, *machine, **more)


def estimate_zero2_model_states_mem_needs_all_live(model: nn.Module, *machine: Any, **more: Any) -> None:
    """Print the estimates for `model`, with its optimizer on the host and on the GPU."""
    estimates.show(model_to_params(model), None, *machine, **more)


class DeepSpeedZeroOptimizer(Wrapper):
    """The class of DeepSpeed's optimizer of ZeRO 1 and 2."""
