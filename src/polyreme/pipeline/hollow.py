"""What stands in, on a stage, for what other stages have: hollow parameters, and outputs of blocks that are not run.

Invariant: a stand-in has shape, dtype and device of what it stands for, and no numbers that mean anything. What floats of it requires
grad, so that whatever is computed from it with gradients on can be told by its graph. No communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def hollow(like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of `like` that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


def mark(tensor: Tensor, what: str) -> None:
    """Make `tensor` one that `foreign` finds in what is computed from it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_()
        tensor._of_another_stage = what  # type: ignore[attr-defined]


def is_marked(value: object) -> bool:
    """Whether it is a tensor that `mark` marked."""
    return isinstance(value, Tensor) and hasattr(value, "_of_another_stage")


def output_of(name: str, tensor: Tensor) -> Tensor:
    """In place of an output of `name`, which this stage does not run."""
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
