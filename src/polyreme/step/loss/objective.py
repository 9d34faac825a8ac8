"""The loss of a micro-batch, the model's own or a loss function's, as a sum and the weight that the sum is
over.

Invariant: the sum of all losses over the sum of all weights is the mean over the global batch, however the
batch is split over micro-batches and ranks. Where the loss is a mean over labels, its weight is their number;
otherwise the number of samples."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme.errors import BatchError, warn
from polyreme.models.huggingface import (
    IGNORED_LABEL,
    NUM_ITEMS,
    ForwardSignature,
    count_labels,
    map_leaves,
    tensors_in,
    training_arguments,
)
from polyreme.step.batch.batches import leading_sizes
from polyreme.step.loss.graph import describe_terms

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, float | Tensor]]
"""loss_fn(output, target) -> mean loss (scalar), or (sum of losses, weight). `target` is the batch's last
element where the batch is a tuple, and the whole batch otherwise."""


class Objective:
    """Calls the model on a micro-batch and reads its loss. Inputs of the model are cast to its dtype, targets
    are not.

    A mapping is passed to the model as keyword arguments (with a `loss_fn`, only those that its forward
    takes, and no `labels`), a tuple or list as positional arguments (with a `loss_fn`, all but the last),
    anything else as the one argument."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None = None,
        cast: Callable[[Any], Any] = lambda inputs: inputs,
        is_split: bool = True,
        share: float | None = None,
        warns: bool = True,
    ) -> None:
        """`cast` brings inputs into the dtype that the model computes in. warns: this rank warns, for all.
        is_split, share: see `cut`."""
        self._warns = warns
        self.cut(is_split, share)
        if getattr(loss_fn, "reduction", None) == "sum" and share is None:
            raise BatchError(
                'loss_fn has reduction="sum": a step is the mean over the '
                "global batch, so let loss_fn return the mean, or (sum, what the "
                "mean is to be over)"
            )
        self._loss_fn, self.cast = loss_fn, cast
        self._call(model)

    @property
    def is_own(self) -> bool:
        """True if the loss is the model's own."""
        return self._loss_fn is None

    def cut(self, is_split: bool, share: float | None) -> None:
        """Set how batches are cut. is_split: a step has several micro-batches, over all ranks, so that it
        matters what a loss is a mean over. `share`: every loss has this weight instead."""
        self._share = share
        # True once a loss was checked to be a mean over its weight
        self._checked = not is_split or share is not None

    def of(self, model: nn.Module) -> Objective:
        """Return an objective that calls another model, cut in the same way."""
        made = copy.copy(self)
        made._call(model)
        return made

    def _call(self, model: nn.Module) -> None:
        self.model = model
        self._signature = ForwardSignature.of(model)
        self.fixed = training_arguments(model)

    def call(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call the model in a loop of the user's own, and return its output."""
        return self.model(*self.cast(args), **{**self.fixed, **self.cast_keywords(kwargs)})

    def output(self, batch: Any) -> Any:
        """Return the model's output for a micro-batch."""
        args, kwargs = self.cast(self._positional(batch)), self.cast_keywords(self._keywords(batch))
        return called(self.model, args, kwargs, own_loss=self._loss_fn is None)

    def cast_keywords(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the model: all cast but `labels`, which only its loss reads, and
        without `num_items_in_batch`, as its loss must be the mean over the micro-batch."""
        if self._share is not None:
            return {name: value if name == "labels" else self.cast(value) for name, value in inputs.items()}
        if NUM_ITEMS in inputs and self._warns:
            warn(
                f"{NUM_ITEMS} is not passed to the model, which so returns "
                "the mean over the micro-batch's labels: the engine counts the "
                "labels of the global batch itself, and the step is their mean",
                every=True,
            )
        return {
            name: value if name == "labels" else self.cast(value)
            for name, value in inputs.items()
            if name != NUM_ITEMS
        }

    def loss(self, output: Any, batch: Any, weight: float | None = None) -> tuple[Tensor, float]:
        """Return the sum of losses and the weight of a model's output for `batch`; a zero where `weight` is
        0."""
        # no label: the mean is 0/0, and so is its gradient; the graph is kept, as other ranks wait for its
        # backward
        if weight == 0:
            return _zero(output), 0.0
        if self._loss_fn is None:
            loss = _own_loss(output)
            self.check_own(loss, float(self.weight(batch) if weight is None else weight))
        else:
            given = _alike(output, self._target(batch), self._loss_fn)
            loss = self._loss_fn(*given)
            if isinstance(loss, tuple) and len(loss) == 2:
                if self._share is None:
                    return _scalar(loss[0]), float(loss[1])
                loss = loss[0] / loss[1]
            if not self._checked and torch.is_grad_enabled():
                self._checked = True
                known = _classes(self._loss_fn, given[1]) is not None
                if not known and (seen := _no_mean(self._loss_fn, *given, loss)) and self._warns:
                    warn(seen, every=True)
        return self.sum_of(loss, float(self.weight(batch) if weight is None else weight), output)

    def check_own(self, loss: Any, weight: float) -> None:
        """Warn, once, where a loss, mostly the model's own, is visibly no mean over `weight`."""
        if self._checked or not weight or not torch.is_grad_enabled() or not isinstance(loss, Tensor):
            return
        self._checked = True
        if (seen := describe_terms(loss, weight)) is not None and self._warns:
            warn(
                f"the loss of {type(self.model).__name__} is made of {seen}, "
                f"and it is weighted as a mean over {weight:g} labels or "
                "samples: with several micro-batches or ranks a step may not "
                "be the mean over the global batch. Say what it is the mean "
                "of: engine.backward(loss, weight=...), or a loss_fn that returns (sum of losses, weight)",
                every=True,
            )

    def sum_of(self, loss: Any, weight: float, output: Any) -> tuple[Tensor, float]:
        """Return the sum that a mean loss of this `weight` stands for, and the weight. Raises BatchError for
        a loss that is not a scalar."""
        # no label: the mean is 0/0, and so is its gradient; the graph is kept, as other ranks wait for its
        # backward
        if weight == 0:
            return _zero(output), 0.0
        loss = _scalar(loss)
        return loss * weight, weight

    def weight(self, batch: Any) -> float:
        """Return the number that a mean loss over `batch` is over. Raises BatchError where it cannot be
        counted."""
        if (weight := self.visible_weight(batch)) is None:
            raise BatchError(
                "what the loss is the mean of cannot be seen: the batch "
                f"has tensors of {sorted(leading_sizes(batch))} rows. Say it: "
                "engine.backward(loss, weight=...), or return (sum of losses, weight) from a loss_fn"
            )
        return weight

    def visible_weight(self, batch: Any) -> float | None:
        """Return the number of the batch's labels, or else of its samples: the first dimension that all its
        tensors share, or that a `loss_fn`'s target has; None where there is none."""
        if self._share is not None:
            return self._share
        target = self._target(batch)
        labels = count_labels(self.model, batch) if self._loss_fn is None else _classes(self._loss_fn, target)
        if labels is not None:
            return labels
        return next(
            (sizes.pop() for sizes in (leading_sizes(batch), leading_sizes(target)) if len(sizes) == 1), None
        )

    def _target(self, batch: Any) -> Any:
        return batch[-1] if self._loss_fn is not None and isinstance(batch, tuple | list) else batch

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
    """Return the loss in a model's output: `.loss`, ["loss"], the first of a tuple, or the output itself."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    elif loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    elif loss is None:
        loss = output
    if loss is None:
        raise BatchError(
            "the model returned no loss: give it `labels` in the batch, or give initialize() a loss_fn"
        )
    return loss


def called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], own_loss: bool) -> Any:
    """Return what the model makes of a batch. Raises BatchError where a model that is to return its own loss
    does not take all of it."""
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if not own_loss or _takes(model, args, kwargs):
            raise
        raise BatchError(
            f"{type(model).__name__} cannot be called with the batch: {error}. Without a loss_fn "
            "the model gets all of it, and returns its loss: give loss_fn=..., which gets "
            "the model's output and the target"
        ) from error


def _takes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the model's forward has parameters for these arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _classes(loss_fn: Any, target: Any) -> float | None:
    """Return the number that torch's cross entropy of `target` is a mean over: its classes' weights summed,
    or the number of targets that are not ignored. None for any other loss_fn, and where targets are
    probabilities."""
    known = loss_fn in (F.cross_entropy, F.nll_loss) or isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss)
    if not known or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = target[target != getattr(loss_fn, "ignore_index", IGNORED_LABEL)]
    weights = getattr(loss_fn, "weight", None)
    return counted.numel() if weights is None else float(weights.double().to(counted.device)[counted].sum())


def _no_mean(loss_fn: LossFn, output: Any, target: Any, loss: Any) -> str:
    """Compare, once, the loss of a micro-batch with the mean of its halves' losses. Returns a warning where
    it is no mean over samples, else "". All ranks call, as a loss_fn may communicate between them."""
    sizes = leading_sizes((output, target))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not tensors_in(output):  # nothing to halve
        return ""
    if len(sizes) != 1 or (samples := sizes.pop()) < 2:
        return ""
    state, half = torch.get_rng_state(), samples // 2
    total, seen = 0.0, ""
    # a loss_fn may not take fewer samples
    with torch.no_grad(), contextlib.suppress(Exception):
        for rows in (slice(half), slice(half, None)):
            total += float(loss_fn(*_rows((output, target), rows))) * len(range(samples)[rows])  # type: ignore[arg-type]
        whole, mean = float(loss.detach()), total / samples
        # a sum near 0 has few correct digits
        rounding = max(1e-3, 4 * torch.finfo(loss.dtype).eps) * max(abs(whole), abs(mean)) + 1e-6
        if abs(whole - mean) > rounding and math.isfinite(whole) and math.isfinite(mean):
            seen = (
                f"the loss of a micro-batch of {samples} samples is {whole:g}, "
                f"but the mean over its halves {mean:g}: loss_fn returns no "
                "mean over samples, as which the engine weights it. Return "
                "(sum of losses, weight); with class weights or masks, "
                "weight is their sum. A loss that compares samples with each other depends on batch.micro"
            )
    torch.set_rng_state(state)
    return seen


def _rows(value: Any, rows: slice) -> Any:
    return map_leaves(lambda t: t[rows] if isinstance(t, Tensor) and t.dim() else t, value)


def _alike(output: Any, target: Any, loss_fn: Any = None) -> tuple[Any, Any]:
    """Return output and target with their floating tensors in the widest dtype among them, where the target
    (or the loss_fn, by class weights) has some: no number of it is rounded, and torch's losses get one
    dtype."""
    wanted, made = (
        [t.dtype for t in tensors_in(value) if t.is_floating_point()] for value in (target, output)
    )
    wanted += (
        [t.dtype for t in loss_fn.buffers() if t.is_floating_point()]
        if isinstance(loss_fn, nn.Module)
        else []
    )
    if not wanted:
        return output, target
    widest = reduce(torch.promote_types, wanted + made)

    def widen(leaf: Any) -> Any:
        return leaf.to(widest) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(widen, output), map_leaves(widen, target)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise BatchError(
            f"the loss must be a scalar tensor, but is {what}: give backward() the tensor of a mean loss, "
            "not its .item(); a loss_fn returns that, or (loss_sum, weight)"
        )
    if loss.grad_fn is None and torch.is_grad_enabled():
        raise BatchError(
            "the loss does not depend on any trainable parameter (it has no gradient): compute it of the "
            "model's output as it is (not of .detach() or .item()), with gradients on: neither under "
            "torch.no_grad() nor behind torch.set_grad_enabled(False)"
        )
    return loss.reshape(()) if loss.dtype.itemsize >= 4 else loss.reshape(()).float()


def _zero(output: Any) -> Tensor:
    """Return a zero that depends on all of `output`, with a gradient of zero, even where `output` has NaN."""
    floating = [t for t in tensors_in(output) if t.is_floating_point()]
    # a scalar may be the loss, 0/0, and so is its gradient
    tensors = [t for t in floating if t.dim()] or floating
    return sum(((torch.nan_to_num(t) * 0.0).sum().float() for t in tensors), torch.zeros(()))
