"""DeepSpeed's helper functions for scripts: norms and overflows of gradients, dividing items into parts, and
reports of memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.refusal import CallError
from polyreme.compat.deepspeed.utils import groups
from polyreme.compat.deepspeed.utils.groups import (
    bwc_tensor_model_parallel_rank as bwc_tensor_model_parallel_rank,
)
from polyreme.compat.deepspeed.utils.helpers import required_torch_version as required_torch_version

GIB = 1 << 30
noop_context = contextlib.nullcontext
__getattr__ = lazily(__name__)


class DummyOptim:
    """A stand-in for an optimizer, which has nothing but one group of `params`."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of the file `filename`, if it is missing."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    # `torch.manual_seed` notes its caller's stack for devices to come: longer than a layer's forward
    seeds = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seeds(seed % (1 << 63))
    numpy.random.seed(seed % (1 << 32))
    random.seed(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call of `base` with these arguments as code."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return `item`, or a nested collection of tensors, on the device. A tensor that fulfils the criterion is
    moved in place, and stays the same object."""

    def move(each: Any) -> Any:
        if criterion_func is None or not criterion_func(each):
            return each.to(device)
        each.data = each.to(device).data
        return each

    return pytree.tree_map(move, item)


# ---- gradients and their norms


def is_model_parallel_parameter(p: Any) -> bool:
    """Return whether a parameter is marked as a part of one that tensor-parallel ranks divide."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return, as a tensor, whether a number of `x` is not finite. Takes no memory of the size of `x`."""
    values = x._values() if x.is_sparse else x
    # the least and the largest are finite if all are; an empty tensor has neither
    ends = (values.amin(), values.amax()) if values.numel() else (torch.zeros((), device=x.device),)
    return ~torch.stack(ends).isfinite().all()


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Write `val` over the numbers of `input` that are not finite."""
    input.masked_fill_(~input.isfinite(), val)


def is_invalid_grad_norm(norm: Any) -> bool:
    """Return whether a norm, or any of a tensor of norms, is negative or not finite."""
    norms = torch.as_tensor(norm)
    return bool((~torch.isfinite(norms) | (norms < 0)).any())


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the norm of a whole from the norms of its parts: infinity if one is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.inf if any(map(is_invalid_grad_norm, norms)) else math.hypot(*norms)


def _norm(tensors: Sequence[Tensor], norm_type: float, mpu: Any, own: Callable[[Tensor], bool]) -> Tensor:
    """Return the fp32 norm of all numbers in `tensors`, and in those of the other ranks of an mpu's
    model-parallel group. Unless it is the largest number that counts, a rank adds only tensors that are its
    `own`, so that none counts twice. Collective with an mpu."""
    largest = norm_type == math.inf
    counted = [each for each in tensors if largest or own(each)]
    norms = [torch.linalg.vector_norm(each.detach().float(), norm_type) for each in counted]
    device = get_accelerator().current_device_name()
    parts = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, device=device)
    total = parts.max() if largest else parts.pow(norm_type).sum()
    if mpu is not None:
        how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, op=how, group=mpu.get_model_parallel_group())
    return total if largest else total.pow(1.0 / norm_type)


def _finite(total: Tensor) -> float:
    return total.item() if math.isfinite(total) else -1.0


def _norm_of_gradients(parameters: Any, norm_type: float, mpu: Any) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of parameters, and their norm. Those of parameters that an mpu's ranks share are
    counted by the first of the ranks."""
    every = [parameters] if isinstance(parameters, Tensor) else parameters
    shares = mpu is not None and mpu.get_model_parallel_rank() > 0
    found = [(each.grad, shares and not is_model_parallel_parameter(each)) for each in every]
    gradients = [grad for grad, _ in found if grad is not None]
    shared = {id(grad) for grad, is_shared in found if is_shared}
    return gradients, _norm(gradients, float(norm_type), mpu, lambda grad: id(grad) not in shared)


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the gradients of `parameters`; -1 if it is not finite. Collective with an mpu, of
    whose ranks the first counts the parameters that they share."""
    return _finite(_norm_of_gradients(parameters, norm_type, mpu)[1])


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of `parameters`; -1 if it is not finite. Collective with an mpu."""
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    first = mpu is None or mpu.get_model_parallel_rank() == 0
    return _finite(_norm(every, float(norm_type), mpu, lambda p: first or is_model_parallel_parameter(p)))


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`. Returns the norm before: the mean
    over the data-parallel ranks. Collective."""
    gradients, total = _norm_of_gradients(parameters, norm_type, mpu)
    if dist.is_initialized():
        group = groups._get_data_parallel_group()
        total = total / dist.get_world_size(group)
        dist.all_reduce(total, group=group)
    return clip_tensors_by_global_norm(gradients, max_norm, total)


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """Return the fp32 norm of all numbers in `input_tensors`; -1 if it is not finite. Collective with an mpu.
    Raises UnsupportedError for a group of experts."""
    if moe_ep_group is not None:
        groups._get_expert_parallel_group("")
    total = _norm(list(input_tensors), float(norm_type), mpu, lambda each: True)
    return torch.where(torch.isfinite(total), total, torch.full_like(total, -1.0))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Scale tensors in place so that their norm is at most `max_norm`. Returns the norm before. global_norm:
    that norm, if it is known already."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = (float(max_norm) / (torch.as_tensor(norm) + eps)).clamp(max=1.0)
    for each in input_tensors:
        each.detach().mul_(factor.to(each.device))
    return norm


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """Return how many parameters get a gradient of the backward that runs now. Raises CallError outside of
    one."""
    if torch._C._current_graph_task_id() == -1:
        raise CallError("count_used_parameters_in_backward() outside of a backward: call it in a hook")
    with torch.enable_grad():
        nodes = [torch.autograd.graph._get_grad_fn_or_grad_acc(p) for p in parameters if p.requires_grad]
    return sum(map(torch._C._will_engine_execute_node, nodes))


class CheckOverflow:
    """A check whether gradients are finite: on all ranks with `zero_reduce_scatter`, on those of an mpu's
    model-parallel group with an mpu, else on this rank. With one of the two it is collective."""

    def __init__(
        self,
        param_groups: Any = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.params = list(itertools.chain(*(param_groups or ())))
        self.mpu, self.zero_reduce_scatter = mpu, zero_reduce_scatter

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Return whether a norm is negative or not finite, on any rank of the mpu's group; without an mpu on
        any rank at all, or on this one if `reduce_overflow` is false."""
        return self._anywhere(any(map(is_invalid_grad_norm, norm_group)), reduce_overflow)

    def check(self, param_groups: Any = None) -> bool:
        """Return `has_overflow` of the parameters in these groups, or in those that the check was made
        with."""
        return self.has_overflow(self.params if param_groups is None else itertools.chain(*param_groups))

    def has_overflow(self, params: Iterable[Any], has_moe_params: bool | None = None) -> bool:
        """Return whether the gradient of one of these parameters is not finite, on any of the ranks."""
        found = any(each.grad is not None and bool(has_inf_or_nan(each.grad)) for each in params)
        return self._anywhere(found, self.zero_reduce_scatter)

    def _anywhere(self, here: bool, everywhere: bool) -> bool:
        if self.mpu is None and not everywhere:
            return here
        found = torch.tensor([float(here)], device=get_accelerator().current_device_name())
        group = None if self.mpu is None or self.zero_reduce_scatter else self.mpu.get_model_parallel_group()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return bool(found)


# ---- items divided into parts


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """Return the sums of the first one, the first two, the first three ... of `weights`."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Divide items in a row into parts of equal size, of which the first ones are larger by one if it does
    not work out. Returns the index at which each part begins, and the one at which the last ends."""
    size, left = divmod(num_items, num_parts)
    return [part * size + min(part, left) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Divide items in a row into parts, so that the heaviest and the lightest one differ least. Returns the
    index at which each part begins, and the one at which the last ends. With fewer items than parts, some
    parts are empty. O(items² · parts)."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0.0, *itertools.accumulate(map(float, weights))]
    # of the first items in so many parts: heaviest and lightest part, and where the last one begins
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, math.inf, 0)}
    for items, parts in itertools.product(range(1, len(sums)), range(1, num_parts + 1)):
        for begin in range(items):
            if (before := best.get((begin, parts - 1))) is None:
                continue
            weight = sums[items] - sums[begin]
            heavy, light = max(before[0], weight), min(before[1], weight)
            now = best.get((items, parts))
            if now is None or heavy - light <= now[0] - now[1]:
                best[items, parts] = heavy, light, begin
    bounds = [len(weights)]
    for parts in range(num_parts, 0, -1):
        bounds.append(best[bounds[-1], parts][2])
    return bounds[::-1]


# ---- memory


def empty_cache() -> None:
    """Return unused memory to the device, and begin to measure its peak anew."""
    device = get_accelerator()
    device.empty_cache()
    device.reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print `message` and the memory that device and host use, on the first rank, and begin to measure the
    peak anew. Does nothing unless `force` is true."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device = get_accelerator()
    figures = {
        "MA": device.memory_allocated(),
        "Max_MA": device.max_memory_allocated(),
        "CA": device.memory_reserved(),
        "Max_CA": device.max_memory_reserved(),
    }
    print(message)
    print(" ".join(f"{name} {round(size / GIB, 2)} GB" for name, size in figures.items()))
    from polyreme.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    host = CPU_Accelerator()
    used = host.total_memory() - host.available_memory()
    percent = round(100 * used / host.total_memory(), 1)
    print(f"CPU Virtual Memory:  used = {round(used / GIB, 2)} GB, percent = {percent}%")
    device.reset_peak_memory_stats()
