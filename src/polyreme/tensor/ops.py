"""Autograd functions that communicate over an axis, in pairs in which one's forward is the other's backward;
and the two linear layers made of them.

Contract: outside of a split region (between a column and its row layer) every rank of the axis holds the same
activations, or its slice of the sequence of them, and after backward their complete gradients. All ranks call
the same operations in the same order.

Communication, Shoeybi et al. 2019 ("Megatron-LM") and Korthikanti et al. 2022 ("Reducing Activation
Recomputation"): a row layer sums its output (all-reduce, or a reduce-scatter along the sequence), a column
layer the gradient of its input, while it computes the gradients of its weights. With the sequence split, the
column layer gathers its input; for backward it keeps its own slice and gathers again. In a backward that puts
off the gradients of weights (`weight_gradients`), sums are waited for at once, and the gather is put off with
those gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from polyreme.distributed.mesh import Axis
from polyreme.distributed.work import Work
from polyreme.errors import BatchError
from polyreme.layout.bucket_layout import Cut
from polyreme.pipeline.weight_gradients import current, now_or_later
from polyreme.tensor.states import LOCAL, WHOLE, Passes, State

WAITING = ("cpu",)
"""Types of devices on which reading a number does not stall the host, as they compute while it waits."""


def refuse_outside(numbers: Tensor, stop: int, message: str) -> None:
    """Refuse integers below 0 or from `stop` on, for which no rank has a row: the sum over ranks would be a
    finite, wrong number. Raises BatchError on the CPU, with the number in place of the "{}" of `message`. On
    a GPU it is an assertion on the device, as in torch's own embedding, for which the host does not wait."""
    if numbers.is_meta or not numbers.numel():
        return
    low, high = torch.aminmax(numbers)
    if numbers.device.type not in WAITING:
        torch._assert_async((low >= 0) & (high < stop), message.format("of a batch"))
    elif low < 0 or high >= stop:
        raise BatchError(message.format(int(low if low < 0 else high)))


@dataclass(frozen=True)
class Divided:
    """The mark of a tensor whose dimension `dim` is divided over the ranks. followed: `dim` comes from a
    column layer without heads or sections, and is known through reshapes; else it is the last one. split: it
    was reshaped into several. unit: how many neighbours along it belong together, as those of a head; 0: not
    known."""

    dim: int
    followed: bool = False
    split: bool = False
    unit: int = 0


def mark_divided(shard: Tensor, mark: Divided | None = None) -> None:
    """Mark `shard` as this rank's slice of divided activations, by default along the last dimension."""
    shard._divided = Divided(shard.dim() - 1) if mark is None else mark  # type: ignore[attr-defined]


def is_divided(tensor: Tensor) -> bool:
    """Whether `mark_divided` marked the tensor."""
    return hasattr(tensor, "_divided")


def divided(tensor: Tensor) -> Divided:
    """Return the mark of a tensor that has one."""
    return tensor._divided  # type: ignore[attr-defined]


def sequence_dim(hidden: Tensor) -> int:
    """Return the sequence dimension of hidden states: 1 of (batch, sequence, width), 0 of (batch * sequence,
    width)."""
    return 1 if hidden.dim() > 2 else 0


# ---- gathering and scattering along a dimension, in rank order


class Moved:
    """A tensor that a collective is still writing: `finish` waits and returns it."""

    def __init__(self, work: Work, ranks_first: Tensor, dim: int | None) -> None:
        self._work, self._tensor, self._dim = work, ranks_first, dim

    def finish(self) -> Tensor:
        self._work.wait()
        if self._dim is None:
            return self._tensor
        return self._tensor.movedim(0, self._dim).flatten(self._dim, self._dim + 1)


def start_gather(axis: Axis, shard: Tensor, dim: int) -> Moved:
    """Begin to gather the ranks' shards end to end along `dim`, in rank order."""
    dim %= shard.dim()
    shard = shard.contiguous()
    full = shard.new_empty((axis.size, *shard.shape))
    return Moved(axis.all_gather(full.view(-1), shard.view(-1)), full, dim)


def start_scatter_sum(axis: Axis, full: Tensor, dim: int) -> Moved:
    """Begin to sum `full` over the axis, and to keep this rank's equal slice of the sum along `dim`."""
    ranks_first = full.unflatten(dim, (axis.size, -1)).movedim(dim % full.dim(), 0).contiguous()
    shard = torch.empty_like(ranks_first[0])
    return Moved(axis.reduce_scatter(shard.view(-1), ranks_first.view(-1)), shard, None)


def local_shard(axis: Axis, full: Tensor, dim: int) -> Tensor:
    """Copy this rank's equal slice of `full` along `dim`."""
    shard = full.unflatten(dim, (axis.size, -1)).select(dim % full.dim(), axis.rank)
    return shard.clone(memory_format=torch.contiguous_format)


class _Gather(Function):
    """Forward: all-gather. Backward: this rank's slice of the gradient, which is complete."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(axis, shard, dim).finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return local_shard(ctx.axis, grad, ctx.dim), None, None

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        return Passes(WHOLE, {0: LOCAL})


class _ShardedView(Function):
    """Forward: this rank's slice. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return local_shard(axis, full, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return start_gather(ctx.axis, grad, ctx.dim).finish(), None, None

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        return Passes(LOCAL, {0: WHOLE})


class _Reduce(Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        return Passes(WHOLE, {0: LOCAL})


@dataclass(eq=False)
class Summed:
    """A tensor whose gradient is summed over the ranks that hold its numbers, as `cut` says; but not if each
    rank's gradient was seen to be whole already. seen: the states of its gradients so far."""

    cut: Cut
    seen: State = State.NONE

    @property
    def whole(self) -> bool:
        """Whether the gradients are whole on every rank, so that there is nothing to sum."""
        return self.cut.is_whole and self.seen == WHOLE


class _Summed(Function):
    """Forward: identity. Backward: one all-reduce of the gradients of several tensors; of a divided tensor
    each number is summed over the ranks that hold it."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, summed: Sequence[Summed], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.summed = axis, summed
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        axis, cuts = ctx.axis, [each.cut for each in ctx.summed]
        summed = list(grads)
        # every rank has gradients of the same tensors
        came = {i: grad for i, grad in enumerate(grads) if grad is not None and not ctx.summed[i].whole}
        for dtype in dict.fromkeys(grad.dtype for grad in came.values()):
            mine = {i: grad for i, grad in came.items() if grad.dtype == dtype}
            sizes = [torch.Size(cuts[i].shape).numel() for i in mine]
            flat = next(iter(mine.values())).new_zeros(sum(sizes))
            views = [view.view(cuts[i].shape) for i, view in zip(mine, flat.split(sizes), strict=True)]
            for (i, grad), view in zip(mine.items(), views, strict=True):
                cuts[i].put(grad, axis.rank, view)
            axis.all_reduce(flat).wait()
            for i, view in zip(mine, views, strict=True):
                summed[i] = cuts[i].split(view, axis.rank)
        return None, None, *summed

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        summed, cut = ctx.summed[output], ctx.summed[output].cut
        before, summed.seen = summed.whole, summed.seen | state
        takes = LOCAL if summed.seen == LOCAL else WHOLE if summed.whole else State.NONE
        return Passes(takes, {output: WHOLE if cut.is_whole else LOCAL}, summed.whole and not before)


def gather(axis: Axis, shard: Tensor, dim: int) -> Tensor:
    """Gather the ranks' shards along `dim`. Backward keeps this rank's slice of the complete gradient."""
    return shard if axis.size == 1 else _Gather.apply(shard, axis, dim)


def split(axis: Axis, full: Tensor, dim: int) -> Tensor:
    """Return this rank's equal slice of `full` along `dim`. Backward gathers the gradient."""
    return full if axis.size == 1 else _ShardedView.apply(full, axis, dim)


def reduce(axis: Axis, partial: Tensor) -> Tensor:
    """Sum `partial` over the ranks. Backward passes the gradient on."""
    return partial if axis.size == 1 else _Reduce.apply(partial, axis)


def sum_gradients(axis: Axis, tensors: Sequence[Tensor], summed: Sequence[Summed]) -> tuple[Tensor, ...]:
    """Return `tensors` as they are. Backward sums their gradients over the ranks that hold them, all in one
    all-reduce."""
    return tuple(tensors) if axis.size == 1 or not tensors else _Summed.apply(axis, summed, *tensors)


def split_sequence(axis: Axis, hidden: Tensor) -> Tensor:
    """Return this rank's slice of the sequence. Raises BatchError where its length is not divisible."""
    dim = sequence_dim(hidden)
    if hidden.shape[dim] % axis.size:
        raise BatchError(
            f"a sequence of {hidden.shape[dim]} positions cannot be divided "
            f"over {axis.size} tensor-parallel ranks: pad it to a multiple "
            f"of {axis.size}, or set mesh.sequence_parallel = false"
        )
    return split(axis, hidden, dim)


# ---- linear layers


@dataclass(frozen=True)
class Shape:
    """The form of a linear layer's weight: (in, out) where `transposed`, else (out, in). Outputs after the
    first `used` are padding; None: there is none."""

    transposed: bool = False
    used: int | None = None

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's used outputs."""
        return F.linear(x, self.matrix(weight), bias if bias is None else bias[: self.used])

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as (used outputs, inputs), a view."""
        return (weight.t() if self.transposed else weight)[: self.used]

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """The weight's gradient, in the weight's form, from grad (rows, outputs) and x (rows, inputs). It is
        added to `into` where that is given."""
        if into is None and self.used is None:
            return x.t() @ grad if self.transposed else grad.t() @ x
        out = torch.zeros_like(weight) if into is None else into
        self.matrix(out).addmm_(grad.t(), x)
        return out


PLAIN = Shape()


def _leaf(parameter: Tensor | None) -> Tensor | None:
    """Return a tensor that is a leaf of autograd's graph; None for one that is computed."""
    return parameter if parameter is not None and parameter.is_leaf else None


class _Columns(Function):
    """Linear layers with a common input, each with this rank's slice of its outputs.

    The input is the same on every rank, or with `sequence` this rank's slice of the sequence; `full` is the
    whole sequence then, where that is known."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, sequence: bool, shapes: Sequence[Shape], full: Tensor | None, x: Tensor,
                *parameters: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.axis, ctx.sequence, ctx.shapes = axis, sequence, shapes
        ctx.set_materialize_grads(False)
        count = len(shapes)
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.biases = [None if bias is None else bias.shape for bias in biases]
        ctx.leaves = [_leaf(parameter) for parameter in parameters]
        ctx.at = 0 if full is None else 1  # the position of `x` among the tensors
        if sequence and full is None:
            full = start_gather(axis, x, sequence_dim(x)).finish()
        whole = x if full is None else full
        found = tuple(s.product(whole, w, b) for s, w, b in zip(shapes, weights, biases, strict=True))  # type: ignore[arg-type]
        for each in found if axis.size > 1 else ():
            mark_divided(each)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = (tensor.detach() for tensor in ctx.saved_tensors)
        count, axis, sequence, dim = len(weights), ctx.axis, ctx.sequence, sequence_dim(x)
        needs = ctx.needs_input_grad[5:]
        now = current() is None and any(
            need and grad is not None for need, grad in zip(needs, grads, strict=False)
        )
        gathering = start_gather(axis, x, dim) if sequence and now else None
        flat = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        came = [
            (g, shape.matrix(w))
            for g, shape, w in zip(flat, ctx.shapes, weights, strict=True)
            if g is not None
        ]
        grad_x: Tensor | None = None
        moving: Moved | None = None
        if ctx.needs_input_grad[4] and came:
            total = came[0][0] @ came[0][1]
            for other, matrix in came[1:]:
                total.addmm_(other, matrix)
            if sequence:
                whole = list(x.shape)
                whole[dim] *= axis.size
                moving = start_scatter_sum(axis, total.view(whole), dim)
            else:
                moving = Moved(axis.all_reduce(total), total.view(x.shape), None)

        @functools.cache
        def inputs() -> Tensor:
            whole = (gathering or start_gather(axis, x, dim)).finish() if sequence else x
            return whole.reshape(-1, whole.shape[-1])

        weight_grads = [
            now_or_later(leaf, functools.partial(_weight_grad, shape, grad, inputs, weight))
            if grad is not None and needed
            else None
            for shape, grad, weight, needed, leaf in zip(
                ctx.shapes, flat, weights, needs, ctx.leaves, strict=False
            )
        ]
        bias_grads = [
            now_or_later(leaf, functools.partial(_bias_grad, grad, size[0]))
            if grad is not None and needed
            else None
            for grad, size, needed, leaf in zip(
                flat, ctx.biases, needs[count:], ctx.leaves[count:], strict=True
            )
        ]
        if moving is not None:
            grad_x = moving.finish()
        return None, None, None, None, grad_x, *weight_grads, *bias_grads

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        parameters = dict.fromkeys(range(ctx.at + 1, ctx.at + 1 + len(ctx.leaves)), LOCAL)
        return Passes(LOCAL, {ctx.at: LOCAL if ctx.sequence else WHOLE, **parameters})


def _weight_grad(
    shape: Shape, grad: Tensor, inputs: Callable[[], Tensor], weight: Tensor, into: Tensor | None
) -> Tensor:
    return shape.weight_grad(grad, inputs(), weight, into)


def _bias_grad(grad: Tensor, size: int, into: Tensor | None) -> Tensor:
    """The gradient of a bias from `grad` (..., outputs), padded to `size` outputs; added to `into`, if
    given."""
    sums = F.pad(grad.flatten(0, -2).sum(0), (0, size - grad.shape[-1]))
    return sums if into is None else into.add_(sums)


class _Row(Function):
    """A linear layer with this rank's slice of its inputs. Returns the sum of all ranks' outputs, or with
    `sequence` this rank's slice of that sum."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, sequence: bool, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.axis, ctx.sequence, ctx.shape = axis, sequence, shape
        ctx.save_for_backward(x, weight)
        ctx.leaves = _leaf(weight), _leaf(bias)
        partial = shape.product(x, weight, None)
        if sequence:
            out = start_scatter_sum(axis, partial, sequence_dim(partial)).finish()
        else:
            out = partial.contiguous()
            axis.all_reduce(out).wait()
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        bias_grad = None
        if ctx.needs_input_grad[5]:
            bias_grad = now_or_later(ctx.leaves[1], functools.partial(_bias_grad, grad, grad.shape[-1]))
        if ctx.sequence:
            grad = start_gather(ctx.axis, grad, sequence_dim(grad)).finish()
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = (flat @ ctx.shape.matrix(weight)).view(x.shape) if ctx.needs_input_grad[3] else None
        inputs, shape = x.reshape(-1, x.shape[-1]), ctx.shape
        weight_grad = None
        if ctx.needs_input_grad[4]:
            weight_grad = now_or_later(
                ctx.leaves[0], functools.partial(shape.weight_grad, flat, inputs, weight)
            )
        return None, None, None, grad_x, weight_grad, bias_grad

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        takes = LOCAL if ctx.sequence else WHOLE
        return Passes(takes, {0: LOCAL, 1: LOCAL, 2: takes})


def columns(
    axis: Axis,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    shapes: Sequence[Shape],
    sequence: bool = False,
    full: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return this rank's outputs of column-parallel linear layers that share the input `x` (..., in).
    Backward sums its gradient once for all of them, while it computes the weights' gradients.

    sequence: `x` is this rank's slice of the sequence; outputs are of the whole one. full: the whole input,
    where it is known already."""
    return _Columns.apply(
        axis, sequence, shapes, None if full is None else full.detach(), x, *weights, *biases
    )


def row(
    axis: Axis, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape = PLAIN, sequence: bool = False
) -> Tensor:
    """Return the output of a row-parallel linear layer. x: this rank's slice (..., in / size) of the input.
    The bias is added once, after the sum."""
    return _Row.apply(axis, sequence, shape, x, weight, bias)
