"""Logits in chunks of tokens: the head and what follows it up to the cross entropy are computed for one chunk
after another, and once more in backward, so that no rank has the logits of all its tokens.

The head returns `ChunkedLogits`, which are its input and seem to be the logits. What a model does to each
logit by itself (upcasting, scaling, a soft cap) is noted, and done to each chunk. Any other operation gets
the whole logits where no gradient is recorded, and is refused where one is: nothing takes more memory in
silence.

Invariant: losses and gradients are those of whole logits, up to the order of sums.
Communication: that of the head and of its cross entropy, once more in backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from polyreme.errors import ConfigError, ModelError, Problem
from polyreme.models.patches import InPlace, Patches
from polyreme.models.peft import plain_model
from polyreme.models.tensor_access import sees_gradients, touching

KEY = "context.loss_chunk"
OFF = f'write {KEY} = "none"'

Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function that is applied to logits, and its other arguments."""


@dataclass(frozen=True, eq=False)
class Head:
    """A model's head, whose own forward is `forward`. tokens: of a chunk. name: of the model, for errors."""

    module: nn.Linear
    forward: Callable[[Tensor], Tensor]
    tokens: int
    name: str

    def __call__(self, hidden: Tensor) -> Tensor:
        if sees_gradients([self.module]):
            raise ModelError(
                f"the head of {self.name} has a backward hook, which sees whole logits, but {KEY} = "
                f"{self.tokens} makes none: remove the hook, or {OFF}"
            )
        return ChunkedLogits.of(hidden, self)


def chunk_loss(model: nn.Module, tokens: int, patches: Patches) -> None:
    """Compute the loss of a transformers model in chunks of so many `tokens`. Raises ConfigError for a model
    without a head that gives logits."""
    name = type(plain_model(model)).__name__
    if (head := head_of(model)) is None:
        reason = f"{name} has no linear head that its logits come from"
        raise ConfigError([Problem(KEY, tokens, reason, OFF)])
    later = Head(head, head.forward, tokens, name)
    patches.forward(head, InPlace(head.forward, later))


def head_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear head that the logits of a transformers model come from."""
    plain: Any = plain_model(model)
    head = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) else None


class ChunkedLogits(Tensor):
    """The input (..., width) of a head that was not called yet, which behaves like the logits (...,
    vocabulary). operations: what is to be done to the logits."""

    head: Head
    operations: tuple[Operation, ...]

    @staticmethod
    def of(hidden: Tensor, head: Head, operations: tuple[Operation, ...] = ()) -> ChunkedLogits:
        with torch._C.DisableTorchFunctionSubclass():
            made = hidden.as_subclass(ChunkedLogits)
        made.head, made.operations = head, operations
        return made

    @property
    def hidden(self) -> Tensor:
        """The head's input, as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def sizes(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.module.out_features))

    def whole(self) -> Tensor:
        """Compute all logits."""
        return self.computed(self.hidden)

    def computed(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden`, with all operations done."""
        logits = self.head.forward(hidden)
        for function, args, kwargs in self.operations:
            logits = function(logits, *args, **kwargs)
        return logits

    def in_chunks(self, function: Callable[..., Tensor], *others: Tensor) -> list[Tensor]:
        """Return what the function returns for each chunk of logits, (tokens, vocabulary), and of `others`,
        of as many tokens. Only the head's input is kept for backward."""

        def of_chunk(hidden: Tensor, *rest: Tensor) -> Tensor:
            return function(self.computed(hidden), *rest)

        # split, as the gradient of a split is put together once
        tokens = [each.split(self.head.tokens) for each in (self.hidden.flatten(0, -2), *others)]
        if not torch.is_grad_enabled():
            return [of_chunk(*each) for each in zip(*tokens, strict=True)]
        return [
            checkpoint(of_chunk, *each, use_reentrant=False, preserve_rng_state=False)
            for each in zip(*tokens, strict=True)
        ]

    def put_off(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of these logits without computing all of them; NotImplemented where
        that cannot be."""
        if function in WITHOUT_LOGITS:
            return WITHOUT_LOGITS[function](self, *args, **kwargs)
        name = getattr(function, "__name__", "")
        if touching(function) is None and not name.startswith("new_") and not name.endswith("_like"):
            return function(self.hidden, *args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if function in EACH and not any(tensor.dim() for tensor in tensors):
            return ChunkedLogits.of(self.hidden, self.head, (*self.operations, (function, args, kwargs)))
        return NotImplemented

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if len(found) == 1 and args and args[0] is found[0]:
            result = found[0].put_off(func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        if torch.is_grad_enabled():
            name, head = getattr(func, "__name__", str(func)), found[0].head
            raise ModelError(
                f"{name} reads all logits of {head.name}, of which {KEY} = {head.tokens} makes a chunk at a "
                f"time, for the cross entropy of its own loss: {OFF}, or call it under torch.no_grad()"
            )
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)


def _cross_entropy(
    logits: ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None
    if not plain or len(logits.sizes) != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented

    def losses(chunk: Tensor, labels: Tensor) -> Tensor:
        each = "none" if reduction == "none" else "sum"
        return F.cross_entropy(
            chunk, labels, ignore_index=ignore_index, reduction=each, label_smoothing=label_smoothing
        )

    found = logits.in_chunks(losses, target)
    if reduction == "none":
        return torch.cat(found)
    total = torch.stack(found).sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _index(logits: ChunkedLogits, index: Any) -> Any:
    """Index by slices along all dimensions but the last."""
    given = index if isinstance(index, tuple) else (index,)
    if not all(each is Ellipsis or isinstance(each, slice) for each in given):
        return NotImplemented
    reaches_last = len(given) - (Ellipsis in given) == len(logits.sizes) or given[-1:] != (Ellipsis,)
    if Ellipsis in given and reaches_last and given[-1] != slice(None):
        return NotImplemented
    return ChunkedLogits.of(logits.hidden[index], logits.head, logits.operations)


def reshaped(sizes: torch.Size, shape: tuple[Any, ...]) -> list[int] | None:
    """Return the sizes that logits of `sizes` have after `view` or `reshape` with the arguments `shape`; None
    where the vocabulary does not stay the last dimension."""
    shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if not shape or not all(isinstance(size, int) for size in shape):
        return None
    known = math.prod(size for size in shape if size != -1)
    resolved = [sizes.numel() // known if size == -1 and known else size for size in shape]
    return resolved if resolved[-1] == sizes[-1] and math.prod(resolved) == sizes.numel() else None


def _reshape(logits: ChunkedLogits, *shape: Any) -> Any:
    if (sizes := reshaped(logits.sizes, shape)) is None:
        return NotImplemented
    sizes[-1] = logits.hidden.shape[-1]
    return ChunkedLogits.of(logits.hidden.reshape(sizes), logits.head, logits.operations)


def _flatten(logits: ChunkedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % len(logits.sizes) == len(logits.sizes) - 1:
        return NotImplemented
    return ChunkedLogits.of(logits.hidden.flatten(start_dim, end_dim), logits.head, logits.operations)


def _sum(logits: ChunkedLogits, **options: Any) -> Any:
    return torch.stack(logits.in_chunks(lambda chunk: chunk.sum(**options))).sum()


WITHOUT_LOGITS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.shape.__get__: lambda logits: logits.sizes,  # type: ignore[attr-defined]
    Tensor.size: lambda logits, dim=None: logits.sizes if dim is None else logits.sizes[dim],
    Tensor.numel: lambda logits: logits.sizes.numel(),
    Tensor.nelement: lambda logits: logits.sizes.numel(),
    Tensor.__len__: lambda logits: logits.sizes[0],
    Tensor.__getitem__: _index,
    Tensor.sum: lambda logits, *dims, **kwargs: NotImplemented if dims else _sum(logits, **kwargs),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
}
"""Functions of whole logits that chunks or the head's input are enough for."""
EACH = {
    Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.contiguous,
    Tensor.clone, torch.clone, Tensor.detach, torch.tanh, Tensor.tanh, Tensor.mul, Tensor.__mul__,
    Tensor.__rmul__, torch.mul, Tensor.div, torch.div, Tensor.__truediv__, Tensor.true_divide,
    torch.nan_to_num, Tensor.nan_to_num, Tensor.cpu, Tensor.cuda,
}  # fmt: skip
"""Functions that give each logit a value by itself."""
