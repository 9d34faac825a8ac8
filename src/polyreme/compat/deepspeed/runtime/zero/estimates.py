"""Estimates, by DeepSpeed's formulas, of the memory that a model's states take in DeepSpeed under ZeRO, in
bytes of a host and of a GPU. What Polyreme itself takes is not estimated here."""

from __future__ import annotations

from itertools import product

from torch import nn

GIB = 1 << 30


def parameters(model: nn.Module) -> int:
    """Return the number of elements in the model's parameters; shared ones count once."""
    return sum(each.numel() for each in model.parameters())


def largest_layer(model: nn.Module) -> int:
    """Return the number of elements in the parameters of the module that has the most, without those of
    modules inside it."""
    own = (module.parameters(recurse=False) for module in model.modules())
    return max(sum(map(nn.Parameter.numel, each)) for each in own)


def zero2(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes on a host and on a GPU at stages 1 and 2. A parameter takes 2 bytes on each GPU; its
    gradient, its master and Adam's states take 18 that the GPUs divide between them, or 16 on the hosts."""
    gpus = num_nodes * num_gpus_per_node
    of_cpu = max(4 * gpus, 16) if cpu_offload else 4 * num_gpus_per_node
    on_gpu = 2 * total_params + (0 if cpu_offload else int(18 * total_params / gpus))
    return int(total_params * of_cpu * additional_buffer_factor), on_gpu


def zero3(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes on a host, on a GPU, and of the largest layer, whose parameters and gradients are
    whole on each GPU, at stage 3. Each parameter takes 18 bytes that the GPUs, or the hosts, divide between
    them; without `zero_init` each process begins with the whole model in its host's memory."""
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


def show(
    total_params: int,
    largest_layer_params: int | None = None,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for a model of `total_params` parameters, a row for each way of offloading: at
    stage 3 if the size of its largest layer is given, else at stage 2."""
    machine, where = (num_gpus_per_node, num_nodes), {True: "cpu ", False: "none"}
    stage, model = "1 or 2", f"{total_params / 1e6:.1f}M parameters"
    if largest_layer_params is None:
        rows = [
            (*zero2(total_params, *machine, offload, additional_buffer_factor),
             f"offload_optimizer={where[offload]}")
            for offload in (True, False)
        ]  # fmt: skip
    else:
        stage, model = "3", f"{model}, {largest_layer_params / 1e6:.1f}M of them in the largest layer"
        ways = product(((True, True), (True, False), (False, False)), (True, False))
        rows = [
            (*zero3(total_params, largest_layer_params, *machine, *way, init, additional_buffer_factor)[:2],
             f"offload_param={where[way[1]]}, offload_optimizer={where[way[0]]}, zero_init={int(init)}")
            for way, init in ways
        ]  # fmt: skip
    print(f"Model states in DeepSpeed at ZeRO stage {stage}, in GiB")
    print(f"model: {model}")
    print(f"hosts: {num_nodes}, GPUs on each: {num_gpus_per_node}")
    print(f"{'host':>9} {'GPU':>9}  options")
    for cpu, gpu, options in rows:
        print(f"{cpu / GIB:9.2f} {gpu / GIB:9.2f}  {options}")
