"""BatchNorm in any precision, and over the batch of all ranks (SyncBatchNorm, on CPUs too).

Invariant, if synchronised: outputs, gradients and running statistics are those of one process with the whole
micro-batch, also where ranks have different numbers of samples, and running statistics are the same to the
last bit on every rank. Statistics are kept and computed in the master's dtype. Evaluation does not
communicate. Communication, if synchronised: an all-gather of 2 numbers a channel and a count in a forward, an
all-reduce of 2 numbers a channel in a backward. Ioffe and Szegedy, "Batch Normalization", 2015; sums of
squares are combined as in Chan et al., 1979."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from polyreme.distributed.mesh import Axis
from polyreme.errors import BatchError, ModelError
from polyreme.models.compiler import uncompiled
from polyreme.models.patches import Patches


def normalise(model: nn.Module, axis: Axis, sync: bool, dtype: torch.dtype, patches: Patches) -> set[Tensor]:
    """Make every BatchNorm of `model` keep its statistics in `dtype`, and, with `sync`, compute them over the
    ranks of `axis`; nn.SyncBatchNorm always does. Returns the running statistics that are equal on every
    rank.

    Raises ModelError for an nn.SyncBatchNorm over a process group of its own, and for a synchronised one with
    a forward of its own."""
    alike: set[Tensor] = set()
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        for key in ("running_mean", "running_var"):
            if (buffer := module._buffers.get(key)) is not None:
                buffer.data = buffer.data.to(dtype)
        synchronised = sync or isinstance(module, nn.SyncBatchNorm)
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            raise ModelError(f"{name} is an nn.SyncBatchNorm over a process group of "
                             "its own, but is synchronised over the data-parallel "
                             "ranks: make it without process_group")  # fmt: skip
        own = vars(module).get("forward")
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward) or getattr(
            own, "func", own
        ) not in (None, _forward):
            if synchronised:
                raise ModelError(f"{name} ({type(module).__name__}) has a forward "
                                 "of its own, which is not known to synchronise: "
                                 'use nn.BatchNorm1d, 2d or 3d, '
                                 'or write batch_norm = "broadcast"')  # fmt: skip
            continue
        over = _Ranks(axis) if synchronised and axis.size > 1 else None
        patches.forward(module, functools.partial(_forward, module, over, dtype, name))
        if over is not None:
            alike |= {buffer for buffer in module._buffers.values() if buffer is not None}
    return alike


class _Ranks:
    """A holder of an axis, which copies of the model share."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __deepcopy__(self, _: object) -> _Ranks:
        return self


def _forward(module: _BatchNorm, over: _Ranks | None, dtype: torch.dtype, name: str, input: Tensor) -> Tensor:
    """Compute torch's forward, with weights in the dtype of the statistics, as mixed precision needs."""
    module._check_input_dim(input)
    if input.shape[1] != module.num_features:
        raise ModelError(f"{name}, a BatchNorm of {module.num_features} channels, "
                         f"is given {input.shape[1]}. Where mesh.tp divides the "
                         'layer before it, write "colwise_gather_output" '
                         'for that layer in mesh.tp_plan')  # fmt: skip
    counted = module.training and module.track_running_stats
    if counted and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # a mean over all batches
        momentum = (
            1.0 / float(module.num_batches_tracked)
            if counted and module.num_batches_tracked is not None
            else 0.0
        )
    mean, var = (module.running_mean, module.running_var) if counted or not module.training else (None, None)
    weight, bias = (None if p is None else p.to(dtype) for p in (module.weight, module.bias))
    if over is None or not module.training:
        return F.batch_norm(
            input, mean, var, weight, bias, module.training or mean is None, momentum, module.eps
        )
    output, batch_mean, batch_var = _synchronised(input, weight, bias, over.axis, module.eps, dtype)
    if mean is not None and var is not None:
        with torch.no_grad():
            mean.lerp_(batch_mean, momentum)
            var.lerp_(batch_var, momentum)
    return output


@uncompiled
def _synchronised(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the mean and unbiased variance of the whole batch."""
    found: tuple[Tensor, Tensor, Tensor] = _Normalise.apply(input, weight, bias, axis, eps, dtype)
    return found


class _Normalise(Function):
    """Normalises over the batch of all ranks. input: (samples, channels, ...), of any number of samples, also
    0; weight, bias: (channels,) or None."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        axis: Axis,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims, x = [0, *range(2, input.dim())], input.to(dtype)
        total, mean, squares = _moments(x, dims, axis)
        inverse = torch.rsqrt(squares / total + eps)
        ctx.save_for_backward(input, weight, mean, inverse, total)
        ctx.axis, ctx.dims, ctx.has_bias = axis, dims, bias is not None
        output = (x - _wide(mean, x)) * _wide(inverse, x)
        if weight is not None:
            output = output * _wide(weight, x)
        if bias is not None:
            output = output + _wide(bias, x)
        var = squares / (total - 1)
        ctx.mark_non_differentiable(mean, var)
        return output.to(input.dtype), mean, var

    @staticmethod
    @once_differentiable  # the sums over the ranks have no known second derivative
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, total = ctx.saved_tensors
        grad = gradient.to(mean.dtype)
        normal = (input.to(mean.dtype) - _wide(mean, input)) * _wide(inverse, input)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)])
        of_bias, of_weight = sums.clone()  # of this rank; ZeRO sums them over ranks
        found = None
        if ctx.needs_input_grad[0]:
            ctx.axis.all_reduce(sums).wait()
            by_mean, by_normal = sums / total
            scale = inverse if weight is None else inverse * weight
            found = ((grad - _wide(by_mean, grad) - normal * _wide(by_normal, grad)) * _wide(scale, grad)).to(
                input.dtype
            )
        return (
            found,
            None if weight is None else of_weight,
            of_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _moments(x: Tensor, dims: list[int], axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return, over the batch of all ranks, the number of values a channel, the channels' means, and their
    sums of squared distances from these."""
    channels, count = x.shape[1], x.numel() // x.shape[1]
    mean = x.mean(dims) if count else x.new_zeros(channels)
    mine = torch.cat([x.new_tensor([count]), mean, (x - _wide(mean, x)).square().sum(dims)])
    everyone = mine.new_empty(axis.size * len(mine))
    axis.all_gather(everyone, mine).wait()
    counts, means, squares = everyone.view(axis.size, -1).split([1, channels, channels], dim=1)
    total = counts.sum()
    if count <= 1 and total <= 1:  # `total` is read only with so few samples, as that waits for the device
        raise BatchError("BatchNorm needs more than one value a channel in "
                         f"training, but all {axis.size} ranks together have "
                         f"{int(total)}: make batch.size larger")  # fmt: skip
    mean = (counts * means).sum(0) / total
    return total, mean, (squares + counts * (means - mean).square()).sum(0)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """Reshape values by channel, so that they broadcast with `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
