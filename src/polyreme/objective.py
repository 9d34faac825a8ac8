"""How a micro-batch becomes a loss: the model's own or a loss function's, always as a sum and the weight that it is the sum over.

Invariant: the sum of all losses over the sum of all weights is the mean over the global batch, however the batch is split over
micro-batches and ranks. Where the loss is a mean over labels, its weight is their number; otherwise the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.batches import leading_sizes
from polyreme.errors import BatchError
from polyreme.model_map import ForwardSignature, count_labels, tensors_in, training_arguments

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, float | Tensor]]
"""loss_fn(output, target) -> mean loss (scalar), or (sum of losses, weight). `target` is the batch's last element where the batch is a
tuple, and the whole batch otherwise."""


class Objective:
    """Calls the model on a micro-batch and reads its loss. What the model gets is cast to its dtype; what only the loss sees is not.

    A mapping is passed to the model as keyword arguments (with a `loss_fn`, only those that its forward takes, and no `labels`),
    a tuple or list as positional arguments (with a `loss_fn`, all but the last), anything else as the one argument.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None, cast: Callable[[Any], Any] = lambda inputs: inputs) -> None:
        """`cast` brings what the model gets into the dtype that it computes in."""
        self._model, self._loss_fn, self._cast = model, loss_fn, cast
        self._signature = ForwardSignature.of(model)
        self.fixed = training_arguments(model)

    def __call__(self, batch: Any, weight: float | None = None) -> tuple[Tensor, float]:
        """(sum of losses with its graph, weight). `weight` is `self.weight(batch)`, where that is known already: to count the labels of
        a batch that is on a device waits for the device. Raises BatchError for a loss that is not a scalar."""
        return self.loss(self.output(batch), batch, weight)

    def output(self, batch: Any) -> Any:
        """What the model returns for a micro-batch."""
        return self._model(*self._cast(self._positional(batch)), **self.cast_keywords(self._keywords(batch)))

    def cast_keywords(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments as the model is to get them: all cast but `labels`, which only its loss reads."""
        return {name: value if name == "labels" else self._cast(value) for name, value in inputs.items()}

    def loss(self, output: Any, batch: Any, weight: float | None = None) -> tuple[Tensor, float]:
        """The sum of losses and the weight of a model's output for `batch`; a zero where `weight` is 0."""
        if weight == 0:  # no label: the mean is 0/0, and its gradient too; keep the graph, for the other ranks' sake
            return _zero(output), 0.0
        if self._loss_fn is None:
            loss = _own_loss(output)
        else:
            result = self._loss_fn(*_alike(output, batch[-1] if isinstance(batch, tuple | list) else batch))
            if isinstance(result, tuple) and len(result) == 2:
                return _scalar(result[0]), float(result[1])
            loss = result
        return self.sum_of(loss, float(self.weight(batch) if weight is None else weight), output)

    def sum_of(self, loss: Any, weight: float, output: Any) -> tuple[Tensor, float]:
        """The sum that a mean loss of `weight` stands for, and that weight. Raises BatchError for a loss that is not a scalar."""
        loss = _scalar(loss)
        if weight == 0:  # no label: the mean is 0/0, and its gradient too; keep the graph, for the other ranks' sake
            return _zero(output), 0.0
        return loss * weight, weight

    def weight(self, batch: Any) -> float:
        """What a mean loss over `batch` is the mean of. Raises BatchError where that cannot be seen."""
        if (weight := self.visible_weight(batch)) is None:
            raise BatchError(
                f"what the loss is the mean of cannot be seen: the batch has tensors of {sorted(leading_sizes(batch))} rows. Say it: "
                "engine.backward(loss, weight=...), or return (sum of losses, weight) from a loss_fn"
            )
        return weight

    def visible_weight(self, batch: Any) -> float | None:
        """The batch's labels, or else its samples: the first dimension that all its tensors share, or that a `loss_fn`'s target has; None
        where there is none."""
        labels = count_labels(self._model, batch) if self._loss_fn is None else None
        if labels is not None:
            return labels
        target = batch[-1] if self._loss_fn is not None and isinstance(batch, tuple | list) else batch
        return next((sizes.pop() for sizes in (leading_sizes(batch), leading_sizes(target)) if len(sizes) == 1), None)

    def _positional(self, batch: Any) -> Sequence[Any]:
        if isinstance(batch, Mapping):
            return ()
        if isinstance(batch, tuple | list):
            return batch if self._loss_fn is None else batch[:-1]
        return (batch,)

    def _keywords(self, batch: Any) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            return {}
        if self._loss_fn is None:
            return {**self.fixed, **batch}
        takes = self._signature
        inputs = {k: v for k, v in batch.items() if k != "labels" and (takes.any_name or k in takes.names)}
        return {**self.fixed, **inputs}


def _own_loss(output: Any) -> Any:
    """The loss in a model's output: `.loss`, ["loss"], the first of a tuple, or the output itself."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    elif loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    elif loss is None:
        loss = output
    if loss is None:
        raise BatchError("the model returned no loss: give it `labels` in the batch, or give initialize() a loss_fn")
    return loss


def _alike(output: Any, target: Any) -> tuple[Any, Any]:
    """Both with their floating tensors in the widest dtype among them, where the target has some: no number of it is rounded, and
    torch's losses get one dtype."""
    wanted, made = ([t.dtype for t in tensors_in(value) if t.is_floating_point()] for value in (target, output))
    if not wanted:
        return output, target
    widest = reduce(torch.promote_types, wanted + made)

    def widen(value: Tensor) -> Tensor:
        return value.to(widest) if value.is_floating_point() else value

    return pytree.tree_map_only(Tensor, widen, output), pytree.tree_map_only(Tensor, widen, target)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise BatchError(f"the loss must be a scalar tensor, but is {what}: return a mean loss, or (loss_sum, weight) from loss_fn")
    if loss.grad_fn is None and torch.is_grad_enabled():
        raise BatchError("the loss does not depend on any trainable parameter (it has no gradient)")
    return loss.reshape(()) if loss.dtype.itemsize >= 4 else loss.reshape(()).float()


def _zero(output: Any) -> Tensor:
    """A zero that depends on all of `output` but whose gradient is zero, even where `output` has NaN."""
    floating = [t for t in tensors_in(output) if t.is_floating_point()]
    tensors = [t for t in floating if t.dim()] or floating  # a loss may be 0/0, and so its gradient
    return sum(((torch.nan_to_num(t) * 0.0).sum().float() for t in tensors), torch.zeros(()))
