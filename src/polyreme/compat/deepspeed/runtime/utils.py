"""What DeepSpeed's users take from its runtime: memory reports, gradient norms, and how items are divided."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError, CallError
from polyreme.compat.deepspeed.utils import groups
from polyreme.compat.deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from polyreme.compat.deepspeed.utils.torch import required_torch_version

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "align_dense_tensors",
    "bwc_tensor_model_parallel_rank",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "copy_to_device",
    "count_used_parameters_in_backward",
    "empty_cache",
    "ensure_directory_exists",
    "filter_empty_parameters",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_norm",
    "get_inactive_params",
    "get_ma_status",
    "get_only_unique_item",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "memory_status",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "required_torch_version",
    "see_memory_usage",
    "set_random_seed",
]

T = TypeVar("T")
GIB = 1 << 30


class DummyOptim:
    """The place of an optimizer that is not there: one group of `params`."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(func: T) -> T:
    """`func`."""
    return func


class noop_context:
    """A context in which nothing is different."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: Any) -> None:
        return None


def ensure_directory_exists(filename: str) -> None:
    """Make the folder in which a file is to be."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    if torch.cuda.is_available():
        torch.manual_seed(seed % (1 << 63))
    else:  # `torch.manual_seed` notes its caller's stack for devices to come: longer than a layer's forward
        torch.default_generator.manual_seed(seed % (1 << 63))


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter is marked as a part of a divided one."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _nested(item: Any, change: Callable[[Any], Any]) -> Any:
    """`item` with `change` applied to all in its lists, tuples and dicts."""
    if isinstance(item, list | tuple):
        return type(item)([_nested(each, change) for each in item])
    if isinstance(item, dict):
        return {key: _nested(each, change) for key, each in item.items()}
    return change(item)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """`item` with what fulfils the criterion copied to the device, in nested lists, tuples and dicts, too."""
    return _nested(item, lambda each: each.to(device) if criterion_func(each) else each)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` on the device; tensors that fulfil the criterion stay the same objects."""

    def move(each: Any) -> Any:
        if criterion_func is None or not criterion_func(each):
            return each.to(device)
        each.data = each.to(device).data
        return each

    return _nested(item, move)


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Whether a number of `x` is not finite, as a tensor; without memory of the size of `x`."""
    values = x._values() if x.is_sparse else x
    if not values.numel():
        return torch.tensor(False, device=x.device)
    return ~(torch.isfinite(values.amax()) & torch.isfinite(values.amin()))


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm, or one of a tensor of norms, is not finite or is negative."""
    norms = torch.as_tensor(norm)
    return bool((~torch.isfinite(norms) | (norms < 0)).any())


def filter_empty_parameters(params: Any) -> Any:
    """Parameters, or groups of them, without those of no element."""
    if not isinstance(params, list | tuple):
        return params
    if not params or not isinstance(params[0], dict):
        return [each for each in params if each.numel()]
    left = [{**group, "params": [each for each in group["params"] if each.numel()]} for group in params]
    return [group for group in left if group["params"]]


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The norm of all, from norms of parts; infinity if one of them is not finite or is negative."""
    norms = [float(norm) for norm in norm_list]
    if any(map(is_invalid_grad_norm, norms)):
        return math.inf
    return math.sqrt(sum(norm**2 for norm in norms))


def combine_grad_norm_groups(norm_groups: Iterable[Any], norm_type: float = 2) -> Tensor:
    """The norm of all, from norms of groups; infinity if one of them is not finite or is negative."""
    norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norm_groups])
    if is_invalid_grad_norm(norms):
        return torch.full_like(norms[0], math.inf)
    return torch.linalg.vector_norm(norms, ord=norm_type)


def _norm(tensors: Sequence[Tensor], norm_type: float, mpu: Any, own: Callable[[Tensor], bool]) -> Tensor:
    """The fp32 norm of all numbers of `tensors`, over the ranks of an mpu's model-parallel group, too. Of a
    finite norm a rank counts only what it has as its `own`. Collective with an mpu."""
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


def _with_gradients(parameters: Any) -> list[Tensor]:
    every = [parameters] if isinstance(parameters, Tensor) else parameters
    return [each for each in every if each.grad is not None]


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of all gradients; -1 if it is not finite. Collective with an mpu, whose first rank counts what
    its ranks share."""
    counted = _with_gradients(parameters)
    shared = {
        id(each.grad)
        for each in counted
        if mpu is not None and mpu.get_model_parallel_rank() and not is_model_parallel_parameter(each)
    }
    gradients = [each.grad for each in counted if each.grad is not None]
    total = _norm(gradients, float(norm_type), mpu, lambda each: id(each) not in shared).item()
    return total if math.isfinite(total) else -1.0


get_flattened_grad_norm = get_grad_norm


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of all parameters; -1 if it is not finite. Collective with an mpu."""
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    first = mpu is None or mpu.get_model_parallel_rank() == 0
    total = _norm(every, float(norm_type), mpu, lambda p: first or is_model_parallel_parameter(p)).item()
    return total if math.isfinite(total) else -1.0


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Scale gradients in place so that their norm is `max_norm` at most, and return what it was: the mean of
    that of all data-parallel ranks. Collective."""
    counted = _with_gradients(parameters)
    shared = {
        id(each.grad)
        for each in counted
        if mpu is not None and mpu.get_model_parallel_rank() and not is_model_parallel_parameter(each)
    }
    gradients = [each.grad for each in counted if each.grad is not None]
    total = _norm(gradients, float(norm_type), mpu, lambda each: id(each) not in shared)
    if dist.is_initialized():
        group = groups._get_data_parallel_group()
        total = total / dist.get_world_size(group)
        dist.all_reduce(total, group=group)
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(factor.to(gradient.device))
    return total


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """The norm of all numbers of tensors, fp32; -1 if it is not finite. Collective with an mpu. Raises
    UnsupportedError for a group of experts."""
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
    """Scale tensors in place so that their norm (`global_norm`, if it is known) is `max_norm` at most, and
    return what it was."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    if (factor := max_norm / (norm + eps)) < 1:
        for each in input_tensors:
            each.detach().mul_(factor)
    return norm


def align_dense_tensors(tensor_list: list[Tensor], alignment: int) -> list[Tensor]:
    """`tensor_list`, with zeros after it that make its elements a multiple of `alignment`."""
    missing = -sum(each.numel() for each in tensor_list) % alignment
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else tensor_list


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Those parameters of ZeRO 3 that are not gathered now."""
    return [
        each
        for each in param_list
        if getattr(getattr(each, "ds_status", None), "name", "") == "NOT_AVAILABLE"
    ]


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """The sums of the first, the first two, ... of `weights`."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where each part begins, and where the last ends, of items in a row: parts of equal size, the first ones
    larger by one where that does not go."""
    size, left = divmod(num_items, num_parts)
    return [part * size + min(part, left) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where each part begins, and where the last ends, of items in a row, so that the heaviest and the
    lightest part differ least. With fewer items than parts, some have none. O(items² · parts)."""
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


class CheckOverflow:
    """Whether gradients are not finite, on any of the ranks that are asked: with an mpu those of its
    model-parallel group, with `zero_reduce_scatter` all, else this one. Then it is collective."""

    def __init__(
        self,
        param_groups: Any = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.params = [each for group in param_groups or () for each in group]
        self.mpu, self.zero_reduce_scatter, self.deepspeed = mpu, zero_reduce_scatter, deepspeed

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Whether a norm is none of finite gradients, on any rank of the mpu's group, or else of all unless
        `reduce_overflow` is false."""
        overflow = any(map(is_invalid_grad_norm, norm_group))
        if self.mpu is not None:
            return self._anywhere(overflow, self.mpu.get_model_parallel_group())
        return self._anywhere(overflow, None) if reduce_overflow else overflow

    def check(self, param_groups: Any = None) -> bool:
        """`has_overflow` of the parameters of these groups, or of those that were given first."""
        given = [each for group in param_groups or () for each in group]
        return self.has_overflow(self.params if param_groups is None else given)

    def has_overflow_serial(self, params: Iterable[Any]) -> bool:
        """Whether a gradient on this rank is not finite."""
        return any(each.grad is not None and bool(has_inf_or_nan(each.grad)) for each in params)

    def has_overflow(self, params: Iterable[Any], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient is not finite on the ranks that are asked."""
        overflow = self.has_overflow_serial(params)
        if self.zero_reduce_scatter:
            return self._anywhere(overflow, None)
        return overflow if self.mpu is None else self._anywhere(overflow, self.mpu.get_model_parallel_group())

    def _anywhere(self, overflow: bool, group: Any) -> bool:
        found = torch.tensor([float(overflow)], device=get_accelerator().current_device_name())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return bool(found)


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """How many parameters the backward that runs now gives a gradient. Raises CallError outside of one."""
    if torch._C._current_graph_task_id() == -1:
        raise CallError(
            "count_used_parameters_in_backward must be called during backward execution, in a hook"
        )
    with torch.enable_grad():
        nodes = {
            torch.autograd.graph._get_grad_fn_or_grad_acc(each)
            for each in parameters
            if isinstance(each, Tensor) and each.requires_grad
        }
    return sum(map(torch._C._will_engine_execute_node, nodes))


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Write `val` where `input` is not finite."""
    input.masked_fill_(~input.isfinite(), val)


class PartitionedTensor:
    """This rank's part of a tensor that is divided over a group, in a row and as evenly as it goes."""

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """The part that `to_meta` described. Raises ArgumentError for another rank's."""
        numbers = meta.tolist()
        shape, rest = numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]
        made = cls(torch.empty(shape, device="meta"), group)
        if rest[:2] != [made.num_parts, made.rank]:
            raise ArgumentError(
                f"meta is of rank {rest[1]} of {rest[0]}, and this is {made.rank} of {made.num_parts}"
            )
        made.local_data, made.partition = local_part.detach(), rest[2:]
        made.orig_device = torch.device(device or get_accelerator().device_name())
        return made

    def to_meta(self) -> Tensor:
        """What another process needs to know of this part: dimensions, shape, parts, rank, bounds; int64."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor. Collective."""
        sizes = [end - begin for begin, end in itertools.pairwise(self.partition)]
        longest = self.local_data.new_zeros(max(sizes))  # collectives want equal lengths
        longest[: self.local_data.numel()] = self.local_data
        received = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(received, longest, group=self.group)
        whole = torch.cat([each[:size] for each, size in zip(received, sizes, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def data(self) -> Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


_before = {"alloc": 0, "cache": 0}


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the device's memory and its change since the last call, on one rank or (-1) on all."""
    rank, device = (dist.get_rank() if dist.is_initialized() else 0), get_accelerator()
    if print_rank not in (-1, rank):
        return
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    now = {"alloc": device.memory_allocated(), "cache": device.memory_cached()}
    most = {"alloc": device.max_memory_allocated(), "cache": device.max_memory_cached()}
    print(
        f"RANK={rank} MEMSTATS {msg} device={device.current_device_name()} "
        + " ".join(
            f"current {kind}={now[kind] / GIB:0.4f}GB (delta={(now[kind] - _before[kind]) / GIB:0.4f}GB "
            f"max={most[kind] / GIB:0.4f}GB)"
            for kind in now
        )
    )
    _before.update(now)


def get_ma_status() -> int:
    """Bytes of the device that are allocated, on the first rank; 0 on others."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return 0
    return get_accelerator().memory_allocated()


def empty_cache() -> None:
    """Give memory that is not used back to the device, and begin to measure its peak anew."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print `message` and the memory of device and host on the first rank, with `force`; and begin to measure
    the peak anew."""
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


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call of `base` as it would be written."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def get_only_unique_item(items: Iterable[T]) -> T:
    """The item of which all are. Raises ArgumentError where they differ."""
    different = set(items)
    if len(different) != 1:
        raise ArgumentError(f"expected there to be only one unique element in {different}")
    return different.pop()
