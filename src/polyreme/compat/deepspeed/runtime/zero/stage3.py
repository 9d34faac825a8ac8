"""The memory of ZeRO 3 by DeepSpeed's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import Wrapper
from polyreme.compat.deepspeed.runtime.zero.estimates import Row, largest_layer, parameters, print_estimates
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import GatheredParameters

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of a CPU, of a GPU, and of the largest layer, whose parameters and gradients a GPU has whole. Of
    each parameter 18 bytes are divided between GPUs, or between hosts; without `zero_init` each process
    begins with the whole model on its host."""
    gpus, layer = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    whole = 4 * num_gpus_per_node  # bytes of a parameter on a host whose processes all have it
    if cpu_offload:
        divided = (18 if cpu_offload_params else 16) / num_nodes
        on_gpu = layer + (0 if cpu_offload_params else int(2 * total_params / gpus))
        on_cpu = total_params * (divided if zero_init else max(whole, divided))
    else:
        on_gpu = layer + int(18 * total_params / gpus)
        on_cpu = (largest_layer_params if zero_init else total_params) * whole
    return int(on_cpu * additional_buffer_factor), on_gpu, layer


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Elements of the model's parameters, shared ones once, and of its largest layer."""
    return parameters(model), largest_layer(model)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model takes, for all ways of offloading."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a model of so many parameters takes, for all ways of offloading."""

    def row(optimizer: bool, params: bool, zero_init: bool) -> Row:
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            params,
            zero_init,
            additional_buffer_factor,
        )
        where = {True: "cpu ", False: "none"}
        return cpu, gpu, (
            f"offload_param={where[params]}, offload_optimizer={where[optimizer]}, zero_init={int(zero_init)}"
        )  # fmt: skip

    offloads = ((True, True), (True, False), (False, False))
    rows = [row(*offload, zero_init) for offload in offloads for zero_init in (True, False)]
    of_model = (
        f"{total_params // 1_000_000}M total params, "
        f"{largest_layer_params // 1_000_000}M largest layer params"
    )
    print_estimates(of_model, num_gpus_per_node, num_nodes, rows)


@contextmanager
def unwrap_model_for_generation(model: DeepSpeedEngine) -> Iterator[DeepSpeedEngine]:
    """An engine whose parameters are whole, for several forwards without gradients, as generation makes
    them."""
    with GatheredParameters(model.parameters()):
        yield model


class DeepSpeedZeroOptimizer_Stage3(Wrapper):
    """DeepSpeed's optimizer of ZeRO 3."""
