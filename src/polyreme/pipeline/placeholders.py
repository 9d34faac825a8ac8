"""Placeholders, on a stage, for what other stages have: parameters, and outputs of blocks that are not run.

Invariant: a stand-in has shape, dtype and device of what it stands for, and no numbers that mean anything.
What floats of it requires grad, so that whatever is computed from it with gradients on can be told by its
graph. What a user asks of its numbers raises ModelError. No communication."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.models.tensor_access import touching


def placeholder(like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of `like` that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


class StandIn(Tensor):
    """The class of what stands in for a parameter or buffer of another stage, `of` this name."""

    of: str
    running: ClassVar[int] = 0
    """Stages that run now, which may compute with stand-ins."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not cls.running and (what := touching(func)) is not None:
            next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)).refuse(
                what
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(
            f"{what} of {self.of}, which another pipeline stage has (mesh.pp "
            "> 1): engine.state_dict() gives every rank whole copies of "
            "all, and engine.save writes them; the parameters that "
            "this rank has are those of engine.module.parameters()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"(of another stage, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("pickling (torch.save, copy.copy)")


def mark(tensor: Tensor, what: str) -> None:
    """Make `tensor` one that `foreign` finds in what is computed from it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_()
        tensor._of_another_stage = what  # type: ignore[attr-defined]


def is_marked(value: object) -> bool:
    """Whether it is a tensor that `mark` marked."""
    return isinstance(value, Tensor) and hasattr(value, "_of_another_stage")


def output_of(name: str, tensor: Tensor) -> Tensor:
    """A placeholder for an output of `name`, which this stage does not run."""
    tensor = tensor.detach()
    mark(tensor, f"an output of {name}, which another stage runs")
    return Alias.apply(tensor)


def foreign(outputs: Iterable[Tensor]) -> str | None:
    """What of another stage `outputs` were computed from."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    known = set(todo)
    while todo:
        node = todo.pop()
        if (what := getattr(getattr(node, "variable", None), "_of_another_stage", None)) is not None:
            return what
        fresh = {function for function, _ in node.next_functions if function is not None} - known
        known |= fresh
        todo += fresh
    return None


class Alias(torch.autograd.Function):
    """The same numbers in a tensor that is neither a leaf nor a view, so that a model may write to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
