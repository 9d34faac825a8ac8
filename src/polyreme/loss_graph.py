"""What autograd's record of a loss tells of it: what it is the mean of, and whether it is a sum, or was divided. Changes nothing.

Only what stands at the loss itself is read: a loss put together from several tells nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyreme.errors import BatchError

MEAN, SUM = 1, 2
"""torch's numbers of reductions."""


def weight_of(loss: Tensor) -> float | None:
    """What torch's cross entropy and nll_loss are the mean of: the class weights of the targets, but for ignored ones, summed. None for
    other losses. Waits for the device."""
    node: Any = loss.grad_fn
    if not _name(node).startswith("NllLoss") or node._saved_reduction != MEAN:
        return None
    return float(node._saved_total_weight)


def refuse_scaled(loss: Tensor, own: Any, microbatches: int, samples: int) -> None:
    """Raise BatchError for a loss that is no mean over its micro-batch: one of torch's with reduction="sum", a sum over all `samples`,
    or a mean (or the model's `own` loss) divided by the number of `microbatches` of a step."""
    node: Any = loss.grad_fn
    if _is_sum(node, samples):
        raise BatchError(
            "the loss is a sum over the samples, and engine.backward takes a mean and what it is the mean of: "
            "engine.backward(loss / n, weight=n); the step is the mean over all n"
        )
    inner = node.next_functions[0][0] if _name(node).startswith(("Div", "Mul")) else None
    if inner is None or microbatches == 1 or not isinstance(other := node._saved_other, Tensor) or other.dim():
        return
    by = float(other) if _name(node).startswith("Div") else 1 / float(other or 1)
    if by == microbatches and (_is_mean(inner) or inner is getattr(own, "grad_fn", None)):
        raise BatchError(
            f"the loss was divided by {microbatches}, the micro-batches of a step, as other loops need it: engine.backward and step "
            "make their mean themselves. Give engine.backward the mean loss as it is, or say weight= if the division is meant"
        )


def _name(node: object) -> str:
    return type(node).__name__


def _is_mean(node: Any) -> bool:
    return _name(node).startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN


def _is_sum(node: Any, samples: int) -> bool:
    if getattr(node, "_saved_reduction", None) == SUM:
        return True
    shape: Any = getattr(node, "_saved_self_sym_sizes", ()) if _name(node).startswith("SumBackward") else ()
    return len(shape) > 0 and shape[0] == samples > 1 and not _name(node.next_functions[0][0]).startswith("Stack")
