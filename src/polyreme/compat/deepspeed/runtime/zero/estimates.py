"""How much memory the states of a model take under ZeRO by DeepSpeed's formulas, in bytes of a CPU (of one
host) and of a GPU: DeepSpeed's memory, not Polyreme's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

GIB = 1 << 30
Row = tuple[int, int, str]
"""Bytes of a CPU, bytes of a GPU, and the options they are for."""


def parameters(model: nn.Module) -> int:
    """Elements of the model's parameters, shared ones once."""
    return sum({id(each): each.numel() for each in model.parameters()}.values())


def largest_layer(model: nn.Module) -> int:
    """Elements of the parameters of the module that has the most of its own."""
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def print_estimates(of_model: str, num_gpus_per_node: int, num_nodes: int, rows: Iterable[Row]) -> None:
    """Print the rows for a machine and a model."""
    nodes, gpus = ("nodes" if num_nodes > 1 else "node"), ("GPUs" if num_gpus_per_node > 1 else "GPU")
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.\n"
        f"SW: Model with {of_model}.\n"
        "  per CPU  |  per GPU |   Options"
    )
    for cpu, gpu, options in rows:
        print(f" {cpu / GIB:7.2f}GB | {gpu / GIB:6.2f}GB | {options}")
