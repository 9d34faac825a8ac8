"""DeepSpeed's names of ZeRO stage 3: estimates of its memory, its optimizer's class, and generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import Wrapper
from polyreme.compat.deepspeed.runtime.zero import estimates
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import GatheredParameters

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine

estimate_zero3_model_states_mem_needs = estimates.zero3
estimate_zero3_model_states_mem_needs_all_cold = estimates.show


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements in the model's parameters, and in those of its largest layer."""
    return estimates.parameters(model), estimates.largest_layer(model)


def estimate_zero3_model_states_mem_needs_all_live(model: nn.Module, *machine: Any, **more: Any) -> None:
    """Print the estimates for `model` at stage 3, a row for each way of offloading."""
    estimates.show(*model_to_params(model), *machine, **more)


@contextmanager
def unwrap_model_for_generation(model: DeepSpeedEngine) -> Iterator[DeepSpeedEngine]:
    """Keep the engine's parameters whole in the block, for several forwards without gradients, as a model
    that generates text makes them."""
    with GatheredParameters(model.parameters()):
        yield model


class DeepSpeedZeroOptimizer_Stage3(Wrapper):
    """The class of DeepSpeed's optimizer of ZeRO 3."""
