"""The loop people already have: forward and backward calls of the user's own, and where they belong.

A backward of an engine's output is one of three kinds, told apart when it reaches that output:
- `engine.backward(loss)`: announced.
- `loss.backward()`: counts as the backward of the micro-batch whose output it comes to first, for each engine
  that it comes through.
- `other.backward(loss)`, of an engine on whose output this one's depends or that depends on it (a
  discriminator in a generator's graph): comes through, and what it would give this engine's parameters is
  dropped.
A backward that gives no parameter of this engine a gradient (`torch.autograd.grad` of inputs) is none of its
business. One that comes to no output of `engine(...)`, but to one of the module that the user called, has no
micro-batch, and is refused.

Communication: none but what `step` does.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from polyreme.errors import BatchError, OrderError
from polyreme.models.huggingface import count_tokens, returned
from polyreme.step.batch.batches import Batches, samples_of
from polyreme.step.loss.graph import mixes, refuse_scaled, weight_of
from polyreme.step.loss.objective import Objective
from polyreme.step.step import Step, current
from polyreme.step.user import grad_scaler
from polyreme.step.user.backward import forget, listen, listeners
from polyreme.zero.gather import Hook
from polyreme.zero.reduce import Reducer


@dataclass(eq=False)
class Forward:
    """A forward from which a backward may come."""

    batch: Any
    updates: tuple[int, int]
    """Steps done before it, and weights set by hand."""
    counted: bool = False
    """Whether its backward has come."""


class Loop:
    """What an engine knows of the calls since the last step."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batches: Batches,
        step: Step,
        reducer: Reducer,
        parameters: Sequence[Tensor],
    ) -> None:
        """`parameters`: those to be trained."""
        self._objective, self._batches, self._step, self._reducer = objective, batches, step, reducer
        self._alike = batches.now.mean == "ranks"
        self._last: tuple[Forward, Any] | None = None  # and its output, if its backward is still to come
        self._waiting: weakref.WeakKeyDictionary[Forward, None] = weakref.WeakKeyDictionary()
        """Forwards that a backward may still come to, in their order."""
        self._under_way: Forward | None = None  # a forward in which a backward may come already
        self._reached: Forward | None = None  # to whose output the backward under way came first
        self._aside = False  # the user has called the module since the last forward
        self._task = -1  # autograd's number of the last backward that came by
        self._parameters = parameters
        self._loss: Tensor | None = None  # the loss of the backward under way, if that is known
        self._announced: float | BatchError | None = None  # its weight, or why there is none
        self._hook = model.register_forward_pre_hook(Hook(partial(_call, weakref.WeakMethod(self.called))))
        listen(self)
        # graphs lead to the reducer, and what autograd's own memory holds, Python's collector cannot free
        reducer.unannounced = partial(_call, weakref.WeakMethod(self._begin))
        # `finalize` holds its function for ever: it may not lead to the model or to functions of the script
        weakref.finalize(self, self._hook.remove).atexit = False

    def close(self) -> None:
        """Let go of graphs: their parameters may get other shapes."""
        self._last = None
        self._hook.remove()
        forget(self)

    def announce(self, loss: Tensor | None) -> None:
        """See `Listener`: read what a loss is the mean of while that is there, for the case that its backward
        comes to the output of the last forward."""
        self._loss, self._announced = loss, None
        if loss is None or self._last is None or current() is not None or self._alike:
            return
        forward, output = self._last
        try:
            weight = self._weight_of_loss(loss, forward.batch, output)
            if weight is None:
                weight = self._weight_of_batch(loss, forward.batch, output)
            self._announced = float(weight)
        except BatchError as error:  # it may be of others
            self._announced = error

    def follow(self, roots: Sequence[Tensor]) -> None:
        """See `Listener`."""
        states, inside = self._step.states, torch._C._current_graph_task_id() != -1  # in a recomputation
        if states is not None and not inside:
            states.parts.allow()
        if states is not None and states.between is None and current() is None and not inside:
            states.follow(roots) if roots else states.end()

    @contextmanager
    def inside(self, batch: Any) -> Iterator[Forward]:
        """The forward of a micro-batch, in which, where all count alike, its backward may come already, and
        the step: a model may train itself when it is called, as Lightning's manual optimization does."""
        forward = Forward(batch, self._updates)
        self._under_way = forward if self._alike and torch.is_grad_enabled() else None
        try:
            yield forward
        finally:
            self._under_way = None

    def forward(self, forward: Forward, output: Any) -> None:
        """Take note of the output of a forward, from which a backward may come."""
        if not torch.is_grad_enabled() or forward.counted:  # it is one between, as for a validation loss
            return
        self._last, self._aside = (forward, output), False
        self._waiting[forward] = None
        if self._step.states is not None:
            self._step.states.parts.refuse()
        arrived = partial(_call, weakref.WeakMethod(self.arrived), forward)
        for tensor in returned(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)

    def backward(self, loss: Tensor, weight: float | None, last: bool, keep: bool = False) -> None:
        """Backward of a micro-batch's mean loss, or of one of several that are its sum. keep: the graph."""
        forward, output = self._forward()
        weight = 1.0 if self._alike else weight
        said, own, self._reached = weight is not None, None, None
        if weight is None:
            self._refuse_more(forward.batch)
            own = self._weight_of_loss(loss, forward.batch, output)
            weight = self._weight_of_batch(loss, forward.batch, output) if own is None else own
        loss_sum, weight = self._objective.sum_of(loss, weight, output)
        self._step.backward(loss_sum, weight, *self._size(forward), last, keep)
        if not said and weight and self._reached is None and self._aside:
            raise BatchError(_OF_MODULE)
        if not said and own is None and self._reached not in (None, forward):
            self._check_weight(self._reached.batch, weight)
        if last:
            self._count(self._reached or forward, keep and self._repeats)
        self._reached = None

    @property
    def _repeats(self) -> bool:
        """Whether one forward may have several backwards, each of which is one of the step's."""
        return self._alike and self._step.order.plan.extend

    def _size(self, forward: Forward) -> tuple[int, int]:
        """Tokens and samples of a micro-batch, if they are not counted yet."""
        if forward.counted:
            return 0, 0
        return count_tokens(forward.batch), samples_of(forward.batch, self._batches.now)

    def _weight_alone(self, batch: Any) -> float:
        """The weight of a backward of which no loss is known."""
        return self._step.order.plan.own if self._alike else self._objective.weight(batch)

    def _check_weight(self, batch: Any, weight: float) -> None:
        """Raise BatchError where a loss of the micro-batch `batch` was weighted by another one's, of another
        weight."""
        if (right := self._objective.weight(batch)) != weight:
            raise BatchError(
                "the loss is of a forward before the last one, by whose "
                f"micro-batch it was weighted ({weight:g} labels or samples, not "
                f"{right:g}): call engine.backward before the next engine(...), "
                "or say weight=. Then call engine.zero_grad(), and begin "
                "the step again"
            )

    def _weight_of_loss(self, loss: Any, batch: Any, output: Any) -> float | None:
        """What a loss is the mean of, if it is made of torch's cross entropy."""
        own = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss is own:
            return None
        batching = self._batches.now
        refuse_scaled(loss, own, batching.accumulation, samples_of(batch, batching))
        return weight_of(loss)

    def _weight_of_batch(self, loss: Any, batch: Any, output: Any) -> float:
        """What the batch says that a loss is the mean of."""
        weight = self._objective.weight(batch)
        if loss is getattr(output, "loss", None) or (isinstance(loss, Tensor) and mixes(loss)):
            self._objective.check_own(loss, weight)
        return weight

    def _forward(self) -> tuple[Forward, Any]:
        """The last forward and its output; or where all count alike, the one under way, or one before it,
        once that had its backward."""
        if (inside := self._under_way) is not None:
            return Forward(inside.batch, self._updates) if inside.counted else inside, None
        if self._last is None:
            known = [each for each in self._waiting if each.updates == self._updates and self._alike]
            if not known:
                raise OrderError(_OF_OTHER if self._other_waits() else _NO_FORWARD)
            return known[0], None
        self._check_weights(self._last[0])
        return self._last

    def _other_waits(self) -> bool:
        """Whether another engine of this process has a forward whose backward has not come."""
        gc.collect()  # one that nobody has any more is none
        return any(isinstance(other, Loop) and other._last is not None for other in listeners())

    def _refuse_more(self, batch: Any) -> None:
        """Raise BatchError for more samples than a micro-batch has: a global batch, or one of another number
        of ranks."""
        batching = self._batches.now
        if (samples := samples_of(batch, batching)) > batching.micro:
            raise BatchError(
                f"engine(...) was given {samples} samples, but batch.size = "
                f"{batching.size} over the data-parallel ranks makes "
                f"batch.micro = {batching.micro}: give each rank "
                "its own share in pieces of that size (a DataLoader with "
                f"batch_size={batching.micro} and a DistributedSampler, "
                "or engine.loader), or change batch.size. Where rows are "
                "no samples, say engine.backward(loss, weight=...)"
            )

    def _check_weights(self, forward: Forward) -> None:
        if forward.updates != self._updates:
            raise OrderError(
                "step(), or engine.numbers(...), changed the weights between this forward and its "
                "backward, whose gradients would be those of neither: call "
                "backward before step(), or do the forward again"
            )

    @property
    def _updates(self) -> tuple[int, int]:
        return self._step.state.step, self._step.rewritten

    def _count(self, forward: Forward, keep: bool = False) -> None:
        forward.counted = True
        self._waiting.pop(forward, None)
        if not keep and self._last is not None and self._last[0] is forward:
            self._last = None

    def called(self, *_: Any) -> None:
        """Take note of a call of the module, the engine's or the user's."""
        self._aside = self._aside or torch.is_grad_enabled()
        if self._step.states is not None:
            self._step.states.parts.allow()

    def arrived(self, forward: Forward, _: Tensor) -> None:
        """Take note of a backward that has come to the output of a forward."""
        self._check_weights(forward)
        if current() is None or current() is self._step:
            grad_scaler.check()
        if current() is self._step:
            self._reached = self._reached or forward
        elif (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            if self._accumulates():
                self._begin(forward)

    def _begin(self, forward: Forward | None = None) -> None:
        """A backward that was not announced will give parameters gradients; it has come to the output of
        `forward`, if to any."""
        if current() is None:
            grad_scaler.check()
            last = self._forward() if forward is None else self._last
            if (
                forward is None
                and self._aside
                and last is not None
                and not _will_come_to(t.grad_fn for t in returned(last[1]))
            ):
                raise BatchError(_OF_MODULE)
            forward = forward or self._forward()[0]
            if forward.counted and not self._repeats:
                raise OrderError(_NO_FORWARD)
            if not self._alike:
                self._refuse_more(forward.batch)
            told = self._announced if last is not None and forward is last[0] else None
            if isinstance(told, BatchError):
                raise told
            weight = self._weight_alone(forward.batch) if told is None else told
            tokens, samples = self._size(forward)
            self._count(forward)
            self._step.enter(weight, tokens, samples, self._loss)
        else:
            self._reducer.begin_foreign()
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._step.leave)

    def _accumulates(self) -> bool:
        """Whether the backward under way gives any parameter a gradient."""
        # not held: autograd's own memory holds a parameter, and all that its hooks hold, as long as its node
        with torch._C.DisableTorchFunctionSubclass():
            return _will_come_to(get_gradient_edge(p).node for p in self._parameters if p.requires_grad)


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    # autograd's own memory holds this, and Python's collector cannot free what that holds
    if (known := method()) is not None:
        known(*args)


def _will_come_to(nodes: Iterable[Any]) -> bool:
    """Whether the backward under way computes any of these."""
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # it is `torch.autograd.grad` of a parameter
        return False


_NO_FORWARD = (
    "backward() without a forward of the engine: call engine(...) in the place of the model itself "
    "(engine.module(...) is no micro-batch), with gradients on: not under torch.no_grad(), nor behind a "
    "torch.set_grad_enabled(False) that is still in force. Of several micro-batches, do the "
    "backward of each before the forward of the next; of "
    "several losses of one, engine.backward(loss, last=False)"
)
_OF_OTHER = (
    "backward() without a forward of this engine, while one of another engine waits for its backward: call "
    "backward() of the engine whose forward made the loss. Accelerate calls the one of the model that an "
    "Accelerator prepared first: call accelerator.free_memory(...) before it prepares another model, or take "
    "an Accelerator for each"
)
_OF_MODULE = (
    "this backward is of engine.module(...), which is no micro-batch: "
    "nothing tells what its loss is the mean of. Call engine(...) for the "
    "forward (then engine.zero_grad(), if the step is to begin again)"
)
