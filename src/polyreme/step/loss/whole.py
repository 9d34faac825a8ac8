"""The loss of a micro-batch whose sequences several ranks share, in the place of that of one rank's part.

Invariant: the mean over these ranks of its gradients is the gradient of its value, which all have alike.
Communication: one number over mesh.cp a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis


def whole_loss(loss_sum: Tensor, labels: int, axis: Axis) -> Tensor:
    """Return the mean over the `labels` of all parts, given the sum over this rank's; NaN without labels,
    with a gradient of zero."""
    total = loss_sum.detach().double()
    axis.all_reduce(total).wait()
    mean = (total / labels).to(loss_sum.dtype)
    return _Value.apply(loss_sum * (axis.size / max(labels, 1)), mean)  # type: ignore[no-any-return, no-untyped-call]


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return a model's output with another loss in it."""
    if isinstance(output, tuple):
        return loss, *output[1:]
    output["loss"] = loss
    return output


class _Value(torch.autograd.Function):
    """A tensor with another value. As an operator of its own it hides what the tensor is a mean over."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
