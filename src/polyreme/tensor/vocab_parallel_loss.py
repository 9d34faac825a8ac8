"""Logits whose vocabulary is divided over an axis, and their cross-entropy, for which no rank needs the whole
logits.

A vocabulary-parallel head returns `VocabParallelLogits`, which looks like the whole logits to the model's or
the user's loss. Upcasting, scaling, slicing along other dimensions and `cross_entropy` work on this rank's
shard; any other operation gets the whole logits, gathered for it (all ranks of the axis run the same model
code, so all take part). Operations that write into them raise ModelError.

Communication: two numbers per token all-gathered in forward, none in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from polyreme.distributed.mesh import Axis
from polyreme.errors import VERIFY, ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.sequence.loss_chunks import reshaped
from polyreme.tensor import ops
from polyreme.tensor.states import LOCAL, WHOLE, Passes, State

ROWS = 1 << 20
"""How many logits are converted at a time to the dtype of the sum."""


class _CrossEntropy(Function):
    """The losses (tokens,), in float32 at least, zero for ignored labels, from logits (tokens, this rank's
    slice of the vocabulary, which begins at `start`) and labels (tokens,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, start: int, ignored: int) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = max(ROWS // max(logits.shape[1], 1), 1)
        mine = labels - start
        here = (mine >= 0) & (mine < logits.shape[1]) & (labels != ignored)
        mine = mine.masked_fill(~here, 0)
        ctx.axis = axis
        shard = torch.empty(2, len(labels), dtype=wide, device=logits.device)
        for i in range(0, len(labels), rows):
            torch.logsumexp(logits[i : i + rows].to(wide), 1, out=shard[0, i : i + rows])
        shard[1] = logits.gather(1, mine[:, None])[:, 0].to(wide).masked_fill_(~here, 0)
        shards = shard.new_empty(axis.size, 2, len(labels))
        axis.all_gather(shards.view(-1), shard.view(-1)).wait()
        log_total = torch.logsumexp(shards[:, 0], 0)
        ctx.save_for_backward(logits, mine, here, log_total, labels != ignored)
        return (log_total - shards[:, 1].sum(0)).masked_fill_(labels == ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        logits, mine, here, log_total, counted = ctx.saved_tensors
        grad = grad.masked_fill(~counted, 0)[:, None]
        out = torch.empty_like(logits)
        rows = max(ROWS // max(logits.shape[1], 1), 1)
        for i in range(0, len(mine), rows):
            each = slice(i, i + rows)
            probability = logits[each].to(log_total.dtype, copy=True).sub_(log_total[each, None]).exp_()
            probability.scatter_add_(1, mine[each, None], here[each, None].to(probability.dtype).neg_())
            out[each] = probability.mul_(grad[each])
        return out, None, None, None, None

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes:
        return Passes(WHOLE, {0: LOCAL})


def cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, cut: Cut, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits (tokens, this rank's slice of the vocabulary),
    divided over `axis` by `cut`. All ranks of the axis must call.

    Computed in float32, or float64 for such logits; the result has the dtype of the logits. A label outside
    of the vocabulary is refused by `ops.refuse_outside`."""
    vocabulary = cut.shape[cut.dim]
    ops.refuse_outside(
        labels.masked_fill(labels == ignore_index, 0),
        vocabulary,
        f"label {{}} is outside of the vocabulary of {vocabulary}: write {ignore_index} for no label",
    )
    losses = _CrossEntropy.apply(logits, labels, axis, cut.pieces[axis.rank][0][0], ignore_index)
    if reduction == "none":
        return losses.to(logits.dtype)
    total = losses.sum()
    if reduction == "mean":
        total = total / (labels != ignore_index).sum()
    return total.to(logits.dtype)


class VocabParallelLogits(Tensor):
    """This rank's shard (..., slice of the vocabulary) of logits, which behaves like the whole (...,
    vocabulary)."""

    axis: Axis
    cut: Cut

    @staticmethod
    def of(shard: Tensor, axis: Axis, cut: Cut) -> VocabParallelLogits:
        with torch._C.DisableTorchFunctionSubclass():
            made = shard.as_subclass(VocabParallelLogits)
        made.axis, made.cut = axis, cut
        return made

    @property
    def shard(self) -> Tensor:
        """This rank's logits, as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def whole(self) -> Tensor:
        """Gather the logits of all ranks; backward keeps this rank's slice of the gradient. All ranks of the
        axis must call."""
        shard = self.shard
        if missing := self.cut.length - shard.shape[-1]:
            shard = F.pad(shard, (0, missing))
        full = ops.gather(self.axis, shard, -1)
        if self.cut.length * self.axis.size == self.vocabulary:
            return full
        held = [
            full.narrow(-1, rank * self.cut.length, self.cut.used(rank)) for rank in range(self.axis.size)
        ]
        return torch.cat(held, -1)

    @property
    def vocabulary(self) -> int:
        return self.cut.shape[self.cut.dim]

    @property
    def sizes(self) -> torch.Size:
        """The shape of the whole logits."""
        return torch.Size((*self.shard.shape[:-1], self.vocabulary))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], VocabParallelLogits) else None
        others = [
            leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, VocabParallelLogits)
        ]
        if logits is not None and not others and (on_shard := ON_SHARD.get(func)):
            result = on_shard(logits, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(func, "__name__", "")
        if (
            name in ("__setitem__", "__set__")
            or (name.endswith("_") and not name.endswith("__"))
            or "out" in kwargs
        ):
            raise ModelError(
                f"{name} writes into logits whose vocabulary is divided over "
                "the tensor-parallel ranks: use the operation that returns a "
                f'new tensor, or place the head whole on every rank with "replicate"; {VERIFY}'
            )
        args, kwargs = pytree.tree_map_only(
            VocabParallelLogits, VocabParallelLogits.whole, (tuple(args), dict(kwargs))
        )
        return func(*args, **kwargs)


def _plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function on the shard: its result is the same as for the whole."""
    return lambda logits, *args, **kwargs: func(logits.shard, *args, **kwargs)


def _same(func: Callable[..., Any]) -> Callable[..., Any]:
    """Apply an elementwise function to the shard; its other arguments must be scalars, or tensors without
    dimensions."""

    def local(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.dim() for tensor in tensors):
            return NotImplemented
        # each rank's gradient of such a number is of its slice of the logits
        args, kwargs = pytree.tree_map_only(Tensor, partial(_summed, logits.axis), (args, kwargs))
        result = func(logits.shard, *args, **kwargs)
        return (
            VocabParallelLogits.of(result, logits.axis, logits.cut) if isinstance(result, Tensor) else result
        )

    return local


def _summed(axis: Axis, number: Tensor) -> Tensor:
    if not number.requires_grad:
        return number
    return ops.sum_gradients(axis, [number], [ops.Summed(Cut.whole(number.shape, axis.size))])[0]


def _index(logits: VocabParallelLogits, index: Any) -> Any:
    """Index the shard by slices and integers along all dimensions but the last."""
    given = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or isinstance(each, int | slice) for each in given):
        return NotImplemented
    named = sum(each is not None and each is not Ellipsis for each in given)
    last_is_given = named == logits.shard.dim() or (Ellipsis in given and given[-1] is not Ellipsis)
    if (last_is_given and given[-1] != slice(None)) or (given and given[-1] is None):
        return NotImplemented
    return VocabParallelLogits.of(logits.shard[index], logits.axis, logits.cut)


def _reshape(func: Callable[..., Any]) -> Callable[..., Any]:
    """Reshape the shard, where the vocabulary stays the last dimension."""

    def local(logits: VocabParallelLogits, *shape: Any) -> Any:
        if (sizes := reshaped(logits.sizes, shape)) is None:
            return NotImplemented
        shard = func(logits.shard, (*sizes[:-1], logits.shard.shape[-1]))
        return VocabParallelLogits.of(shard, logits.axis, logits.cut)

    return local


def _flatten(logits: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.shard.dim() == logits.shard.dim() - 1:
        return NotImplemented
    return VocabParallelLogits.of(logits.shard.flatten(start_dim, end_dim), logits.axis, logits.cut)


def _cross_entropy(
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    shard = logits.shard
    if not plain or shard.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    return cross_entropy(shard, target, logits.axis, logits.cut, ignore_index, reduction)


def _size(logits: VocabParallelLogits, dim: int | None = None) -> Any:
    return logits.sizes if dim is None else logits.sizes[dim]


ON_SHARD: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda logits, *_: logits.sizes,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.numel: lambda logits: logits.sizes.numel(),
    Tensor.__len__: lambda logits: logits.sizes[0],
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    **{func: _reshape(func) for func in (Tensor.view, Tensor.reshape, torch.reshape)},
    **{
        getattr(Tensor, name).__get__: _plain(getattr(Tensor, name).__get__)
        for name in (
            "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "is_nested", "ndim", "is_cuda",
            "is_cpu", "is_meta", "layout",
        )
    },
    **{
        func: _plain(func)
        for func in (
            Tensor.dim, Tensor.is_floating_point, Tensor.get_device, torch.is_floating_point,
            Tensor.is_complex, torch.is_complex, Tensor.requires_grad_,
        )
    },
    **{
        func: _same(func)
        for func in (
            Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type,
            Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.tanh, Tensor.tanh, Tensor.mul,
            Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, torch.div, Tensor.__truediv__,
            Tensor.true_divide, Tensor.cpu, Tensor.cuda,
        )
    },
}  # fmt: skip
"""Implementations of functions on one rank's shard; they return NotImplemented for arguments that need the
whole logits."""
