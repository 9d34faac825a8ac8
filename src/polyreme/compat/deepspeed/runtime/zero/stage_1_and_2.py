"""The memory of ZeRO 1 and 2 by DeepSpeed's formulas."""

from __future__ import annotations

from torch import nn

from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import Wrapper
from polyreme.compat.deepspeed.runtime.zero.estimates import Row, parameters, print_estimates


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of a CPU and of a GPU. A parameter has 2 bytes on each GPU, and 18 of gradients, master and
    Adam's states that GPUs divide between them, or 16 that are on the CPU."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    on_cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(on_cpu), 2 * total_params + int(18 * total_params / gpus)


def model_to_params(model: nn.Module) -> int:
    """Elements of the model's parameters, shared ones once."""
    return parameters(model)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model takes, with the optimizer offloaded and without."""
    estimate_zero2_model_states_mem_needs_all_cold(
        parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model of so many parameters takes, with the optimizer offloaded and without."""

    def row(offload: bool) -> Row:
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        return cpu, gpu, f"offload_optimizer={'cpu ' if offload else 'none'}"

    of_model = f"{total_params // 1_000_000}M total params"
    print_estimates(of_model, num_gpus_per_node, num_nodes, map(row, (True, False)))


class DeepSpeedZeroOptimizer(Wrapper):
    """DeepSpeed's optimizer of ZeRO 1 and 2."""
