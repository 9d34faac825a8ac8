"""The loop people already have: forward and backward calls of the user's own, and where they belong.

A backward of an engine's output is one of three kinds, told apart when it reaches that output:
- `engine.backward(loss)`: announced.
- `loss.backward()`: counts as the backward of the last micro-batch that `engine(...)` was given, for each engine that it comes through.
- `other.backward(loss)`, of an engine on whose output this one's depends or that depends on it (a discriminator in a generator's graph):
  comes through, and what it would give this engine's parameters is dropped.
A backward that gives no parameter of this engine a gradient (`torch.autograd.grad` of inputs) is none of its business.

Communication: none but what `step` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from polyreme.batches import samples_of
from polyreme.config import Config
from polyreme.errors import BatchError
from polyreme.loss_graph import mixes, refuse_scaled, weight_of
from polyreme.model_map import count_tokens, returned
from polyreme.objective import Objective
from polyreme.step import Step, current
from polyreme.zero.reduce import Reducer


class Loop:
    """What an engine knows of the calls since the last step."""

    def __init__(self, objective: Objective, config: Config, step: Step, reducer: Reducer, parameters: Sequence[Tensor]) -> None:
        """`parameters`: those to be trained."""
        self._objective, self._config, self._step, self._reducer = objective, config, step, reducer
        self._last: tuple[Any, Any] | None = None  # micro-batch and output of the last forward whose backward is to come
        self._task = -1  # autograd's number of the last backward that came by
        with torch._C.DisableTorchFunctionSubclass():
            self._accumulators = [get_gradient_edge(parameter).node for parameter in parameters]
        reducer.unannounced = self._begin

    def close(self) -> None:
        """Let go of the ends of graphs, whose parameters may get other shapes."""
        self._accumulators.clear()

    def forward(self, batch: Any, output: Any) -> None:
        """Take note of a micro-batch, and of its output, from which a backward may come."""
        if torch.is_grad_enabled():  # else it is one between, as for a validation loss
            self._last = batch, output
            reached = partial(self._reached, updates=self._step.state.step)
            for tensor in returned(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(reached)

    def backward(self, loss: Tensor, weight: float | None, last: bool) -> None:
        """Backward of a micro-batch's mean loss, or of one of several that are its sum."""
        batch, output = self._forward()
        if weight is None:
            self._refuse_more(batch)
            weight = self._weight(loss, batch, output)
        loss_sum, weight = self._objective.sum_of(loss, weight, output)
        self._last = None if last else self._last
        self._step.backward(loss_sum, weight, count_tokens(batch), samples_of(batch, self._config), last)

    def _weight(self, loss: Any, batch: Any, output: Any) -> float:
        """What a loss is the mean of: as torch's cross entropy says, or as the batch does."""
        own = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss is not own:
            refuse_scaled(loss, own, self._config.accumulation, samples_of(batch, self._config))
            if (weight := weight_of(loss)) is not None:
                return weight
        weight = self._objective.weight(batch)
        if loss is own or (isinstance(loss, Tensor) and mixes(loss)):
            self._objective.check_own(loss, weight)
        return weight

    def _forward(self) -> tuple[Any, Any]:
        """The micro-batch whose backward comes, and its output."""
        if self._last is None:
            raise BatchError(
                "backward() without a forward: call engine(...) first (engine.module(...) is no micro-batch). Of several micro-batches, "
                "do the backward of each before the forward of the next; of several losses of one, engine.backward(loss, last=False)"
            )
        return self._last

    def _refuse_more(self, batch: Any) -> None:
        """Raise BatchError for more samples than a micro-batch has: a global batch, or one of another number of ranks."""
        if (samples := samples_of(batch, self._config)) > int(self._config.batch.micro):
            raise BatchError(
                f"engine(...) was given {samples} samples, but batch.size = {self._config.batch.size} over the data-parallel ranks makes "
                f"batch.micro = {self._config.batch.micro}: give each rank its own share in pieces of that size (a DataLoader with "
                f"batch_size={self._config.batch.micro} and a DistributedSampler, or engine.loader), or change batch.size. Where rows are "
                "no samples, say engine.backward(loss, weight=...)"
            )

    def _reached(self, gradient: Tensor, updates: int) -> None:
        """A backward has come to an output of a forward with the weights after so many updates."""
        if updates != self._step.state.step:
            raise BatchError(
                "step() changed the weights between this forward and its backward, whose gradients would be those of neither: call "
                "backward before step(), or do the forward again"
            )
        if current() is self._step or (task := torch._C._current_graph_task_id()) == self._task:
            return
        self._task = task
        if self._accumulates():
            self._begin()

    def _begin(self) -> None:
        """A backward that was not announced will give parameters gradients."""
        if current() is None:
            (batch, output), self._last = self._forward(), None
            self._refuse_more(batch)
            weight = self._objective.weight(batch)
            self._objective.check_own(getattr(output, "loss", None), weight)
            self._step.enter(weight, count_tokens(batch), samples_of(batch, self._config))
        else:
            self._reducer.begin_foreign()
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._step.leave)

    def _accumulates(self) -> bool:
        """Whether the backward under way gives any parameter a gradient."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node in self._accumulators)
        except RuntimeError:  # it is `torch.autograd.grad` of a parameter
            return False
