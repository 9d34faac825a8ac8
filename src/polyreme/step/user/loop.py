"""The loop people already have: the user's own forward and backward calls, matched with each other.

A backward of an engine's output is one of three kinds, which show when it reaches that output:
- `engine.backward(loss)`: announced.
- `loss.backward()`: the backward of the micro-batch whose output it reaches first, for each engine that it
  passes through.
- `other.backward(loss)`, of an engine whose output depends on this one's, or this one's on it (a
  discriminator in a generator's graph): it passes through, and its gradients of this engine's parameters are
  dropped.
A backward without gradients for this engine's parameters (`torch.autograd.grad` of inputs) is ignored. One
that reaches no output of `engine(...)`, but one of the module that the user called, has no micro-batch, and
is refused.

Communication: none but that of `step`."""

from __future__ import annotations

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
from polyreme.step.loss.graph import computed_from, has_cross_entropy, refuse_scaled, weight_of
from polyreme.step.loss.objective import Objective
from polyreme.step.step import Step, current
from polyreme.step.user import grad_scaler
from polyreme.step.user.backward import forget, listen, listeners
from polyreme.zero.gather import Hook
from polyreme.zero.reduce import Reducer


@dataclass(eq=False)
class Forward:
    """A forward of the user's, for which a backward may come."""

    batch: Any
    updates: tuple[int, int]
    """Steps before it, and times that weights were set by hand."""
    counted: bool = False
    """True if its backward has come."""
    weight: float | None = None
    """The number that a mean loss of it is over, where the engine has counted it."""


class UserLoop:
    """The user's forwards and backwards since the last step."""

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
        self._last: tuple[Forward, Any] | None = None  # with its output, until its backward has come
        self._waiting: weakref.WeakKeyDictionary[Forward, None] = weakref.WeakKeyDictionary()
        """Forwards whose backward may still come, in order."""
        self._under_way: Forward | None = None  # a running forward that may contain its own backward
        self._reached: Forward | None = None  # the forward whose output the backward under way reached first
        self._called_module = False  # True if the user has called the module since the last forward
        self._task = -1  # autograd's id of the last backward that passed through
        self._parameters = parameters
        self._loss: Tensor | None = None  # the loss of the backward under way, if known
        self._announced: float | BatchError | None = None  # its weight, or the error of finding it
        self._hook = model.register_forward_pre_hook(Hook(partial(_call, weakref.WeakMethod(self.called))))
        listen(self)
        # weakly, as graphs lead to the reducer, and Python's collector cannot free cycles through autograd's
        # memory
        reducer.unannounced = partial(_call, weakref.WeakMethod(self._begin))
        # `finalize` keeps its function for ever, so that this must not lead to the model or to functions of
        # the script
        weakref.finalize(self, self._hook.remove).atexit = False

    def close(self) -> None:
        """Drop graphs, as their parameters may get other shapes, and stop listening."""
        self._last = None
        self._hook.remove()
        forget(self)

    def announce(self, loss: Tensor | None) -> None:
        """See `Listener`. Reads, while the loss' inputs are there, what it is a mean over, in case its
        backward reaches the output of the last forward."""
        self._loss, self._announced = loss, None
        if loss is None or self._last is None or current() is not None or self._alike:
            return
        forward, output = self._last
        try:
            weight = self._weight_of_loss(loss, forward.batch, output)
            if weight is None:
                weight = self._weight_of_batch(loss, forward, output)
            self._announced = float(weight)
        except BatchError as error:  # the loss may not be of this engine
            self._announced = error

    def follow(self, roots: Sequence[Tensor]) -> None:
        """Follow, in a backward from `roots` that the user's own loop begins, which gradients are whole and
        which are parts of a sum; without roots, that backward has ended."""
        states, inside = self._step.states, torch._C._current_graph_task_id() != -1  # True in a recomputation
        if states is not None and not inside:
            states.divided.allow()
        if states is not None and states.between is None and current() is None and not inside:
            states.follow(roots) if roots else states.end()

    @contextmanager
    def inside(self, batch: Any) -> Iterator[Forward]:
        """Context of the forward of a micro-batch. Where all micro-batches count alike, the backward and the
        step may come within it: a model may train itself when it is called, as in Lightning's manual
        optimization."""
        forward = Forward(batch, self._updates)
        self._under_way = forward if self._alike and torch.is_grad_enabled() else None
        try:
            yield forward
        finally:
            self._under_way = None

    def forward(self, forward: Forward, output: Any) -> None:
        """Note the output of a forward whose backward may come."""
        if not torch.is_grad_enabled() or forward.counted:  # a forward between, as for a validation loss
            return
        self._last, self._called_module = (forward, output), False
        self._waiting[forward] = None
        if self._step.states is not None:
            self._step.states.divided.refuse()
        arrived = partial(_call, weakref.WeakMethod(self.arrived), forward)
        for tensor in returned(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)

    def backward(self, loss: Tensor, weight: float | None, last: bool, keep: bool = False) -> None:
        """Run the backward of a micro-batch's mean loss, or of one of several losses that add up to it. keep:
        retain the graph."""
        forward, output = self._forward(loss)
        weight = 1.0 if self._alike else weight
        said, own, self._reached = weight is not None, None, None
        if weight is None:
            self._refuse_more(forward.batch)
            own = self._weight_of_loss(loss, forward.batch, output)
            weight = self._weight_of_batch(loss, forward, output) if own is None else own
        loss_sum, weight = self._objective.sum_of(loss, weight, output)
        self._step.backward(loss_sum, weight, *self._size(forward), last, keep)
        if not said and weight and self._reached is None and self._called_module:
            raise BatchError(_OF_MODULE)
        if not said and own is None and self._reached not in (None, forward):
            self._check_weight(self._reached, weight)
        if last:
            self._count(self._reached or forward, keep and self._repeats)
        self._reached = None

    @property
    def _repeats(self) -> bool:
        """True if one forward may have several backwards, each of which counts in the step."""
        return self._alike and self._step.order.plan.extend

    def _size(self, forward: Forward) -> tuple[int, int]:
        """Return the tokens and samples of a micro-batch; 0 where they are counted already."""
        if forward.counted:
            return 0, 0
        return count_tokens(forward.batch), samples_of(forward.batch, self._batches.now)

    def _weight_alone(self, forward: Forward) -> float:
        """Return the weight of a backward whose loss is not known."""
        return self._step.order.plan.own if self._alike else self._weight(forward)

    def _weight(self, forward: Forward) -> float:
        return self._objective.weight(forward.batch) if forward.weight is None else forward.weight

    def _check_weight(self, forward: Forward, weight: float) -> None:
        """Raise BatchError where a loss of `forward` was weighted as one of another weight."""
        if (right := self._weight(forward)) != weight:
            raise BatchError(
                "the loss is of a forward before the last one, by whose "
                f"micro-batch it was weighted ({weight:g} labels or samples, not "
                f"{right:g}): call engine.backward before the next engine(...), "
                "or say weight=. Then call engine.zero_grad(), and begin "
                "the step again"
            )

    def _weight_of_loss(self, loss: Any, batch: Any, output: Any) -> float | None:
        """Return the number of labels that a loss of torch's cross entropy is a mean over; None for
        others."""
        own = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss is own:
            return None
        batching = self._batches.now
        refuse_scaled(loss, own, batching.accumulation, samples_of(batch, batching))
        return weight_of(loss)

    def _weight_of_batch(self, loss: Any, forward: Forward, output: Any) -> float:
        """Return the number of labels or samples that a loss is a mean over, counted in the batch."""
        weight = self._weight(forward)
        is_mean = loss is getattr(output, "loss", None) or (
            isinstance(loss, Tensor) and has_cross_entropy(loss)
        )
        if forward.weight is None and is_mean:  # else it was checked when it was counted
            self._objective.check_own(loss, weight)
        return weight

    def _forward(self, loss: Tensor | None = None) -> tuple[Forward, Any]:
        """Return the last forward and its output. Where all micro-batches count alike: the one under way, or
        an earlier one, once the last had its backward. Raises OrderError where there is none, which says
        whether `loss` is of another engine."""
        if (inside := self._under_way) is not None:
            return Forward(inside.batch, self._updates) if inside.counted else inside, None
        if self._last is None:
            known = [each for each in self._waiting if each.updates == self._updates and self._alike]
            if not known:
                raise OrderError(_NO_FORWARD if loss is None or not _of_other(loss) else _OF_OTHER)
            return known[0], None
        self._check_weights(self._last[0])
        return self._last

    def _refuse_more(self, batch: Any) -> None:
        """Raise BatchError for more samples than a micro-batch has, as of a global batch or of another number
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
        """Note a call of the module, by the engine or the user."""
        self._called_module = self._called_module or torch.is_grad_enabled()
        if self._step.states is not None:
            self._step.states.divided.allow()

    def arrived(self, forward: Forward, _: Tensor) -> None:
        """Note that a backward has reached the output of a forward."""
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
        """Begin a backward that was not announced and will give parameters gradients. `forward`: the one
        whose output it has reached, if any."""
        if current() is None:
            grad_scaler.check()
            last = self._forward() if forward is None else self._last
            if (
                forward is None
                and self._called_module
                and last is not None
                and not _will_come_to(t.grad_fn for t in returned(last[1]))
            ):
                raise BatchError(_OF_MODULE)
            forward = forward or self._forward()[0]
            if forward.counted and not self._repeats:
                raise OrderError(_NO_FORWARD)
            if not self._alike:
                self._refuse_more(forward.batch)
            announced = self._announced if last is not None and forward is last[0] else None
            if isinstance(announced, BatchError):
                raise announced
            weight = self._weight_alone(forward) if announced is None else announced
            tokens, samples = self._size(forward)
            self._count(forward)
            self._step.enter(weight, tokens, samples, self._loss)
        else:
            self._reducer.begin_foreign()
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._step.leave)

    def _accumulates(self) -> bool:
        """Return whether the backward under way gives any parameter a gradient."""
        # not stored: autograd would keep a parameter, and all that its hooks hold, alive with its node
        with torch._C.DisableTorchFunctionSubclass():
            return _will_come_to(get_gradient_edge(p).node for p in self._parameters if p.requires_grad)


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    # autograd's memory holds this function, and Python's collector cannot free cycles through it
    if (known := method()) is not None:
        known(*args)


def _of_other(loss: Tensor) -> bool:
    """Return whether the loss is of a forward of some engine that waits for its backward."""
    loops = (each for each in listeners() if isinstance(each, UserLoop))
    return any(each._last is not None and computed_from(loss, returned(each._last[1])) for each in loops)


def _will_come_to(nodes: Iterable[Any]) -> bool:
    """Return whether the backward under way computes any of these nodes."""
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # this backward is `torch.autograd.grad` of a parameter
        return False


_NO_FORWARD = (
    "backward() without a forward of the engine that still waits for it (each has one backward, before the "
    "next step()): call engine(...) in the place of the model itself "
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
