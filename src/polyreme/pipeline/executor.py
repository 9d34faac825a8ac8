"""The interpreter: performs the actions of a schedule's row. The only step path of the engine.

Invariant: a micro-batch's tensors are kept from its forward to its backward at a stage, and no longer, but
for those that a W needs; a received value goes to the stage that the table names. The form of the values that
cross a cut is sent once for each shape of batch, before the first such value.

Communication: activations to the next stage's rank, their gradients back; nothing between stages of one rank.
Receives are waited for when their value is needed, sends when a later message shows that they have arrived,
and when the row ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.distributed.work import Work
from polyreme.errors import ModelError
from polyreme.observer import OBSERVER
from polyreme.pipeline.activation_spec import buffers, flatten, unflatten
from polyreme.pipeline.placeholders import placeholder
from polyreme.pipeline.schedule import Action


class RunStage(Protocol):
    """Runs one stage: `stage.Stage`, or `Whole` for a model that is not cut."""

    def __call__(self, forward: Callable[[], Any], received: Any) -> Any:
        """Call `forward` as this stage, with the value of the previous stage. Returns the model's output, or
        the value for the next stage."""

    def expected(self, forward: Callable[[], Any]) -> Any:
        """Return a value of the structure, shapes and dtypes of what this stage receives from the previous
        one; its numbers mean nothing."""


class Whole:
    """The only stage of a model that is not cut."""

    def __call__(self, forward: Callable[[], Any], received: Any) -> Any:
        return forward()

    def expected(self, forward: Callable[[], Any]) -> Any:
        return None


@dataclass(frozen=True)
class Calls:
    """The functions by which actions process a micro-batch.

    enter(action): called before a forward or backward. forward(batch): calls the model. loss(batch, output):
    makes the loss of the last stage's output. root(batch, loss): the tensor at which the last stage's
    backward begins. differentiate(stage, roots, gradients): a backward; where the table has W, it returns the
    function for W. look(batch): calls the model only for the form of its values. The last three are None
    where there is no backward."""

    enter: Callable[[Action], None]
    forward: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    root: Callable[[Any, Any], Tensor] | None = None
    differentiate: (
        Callable[[int, Sequence[Tensor], Sequence[Tensor | None]], Callable[[], None] | None] | None
    ) = None
    look: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Stages:
    """The stages of a model. ranks: the rank of each on the mesh's pp. run: runs each stage of this rank.
    forms: the forms of values that stages hand on, by stage and shape of batch."""

    ranks: Sequence[int]
    mesh: Mesh
    run: Mapping[int, RunStage]
    forms: dict[tuple[int, Hashable], Any] = field(default_factory=dict)


@dataclass
class _Pass:
    """The tensors of one micro-batch at one stage."""

    received: list[Tensor] = field(default_factory=list)  # those that a backward goes through
    value: Any = None  # the received value, for the model
    form: Any = None  # of the output
    output: list[Tensor] = field(default_factory=list)
    loss: Any = None
    gradients: list[Tensor] = field(default_factory=list)  # received, of the output
    arriving: list[Work] = field(default_factory=list)


class Row:
    """A row under way on this rank. Iterating yields its actions; the caller performs each, by the method for
    its op, before it takes the next. The end of a `with` block waits for all sends."""

    def __init__(
        self,
        stages: Stages,
        actions: Iterable[Action],
        calls: Calls,
        batches: Sequence[Any],
        shapes: Sequence[Hashable] = (),
        arrived: Mapping[Action, Sequence[Action]] = MappingProxyType({}),
    ) -> None:
        """shapes: by micro-batch, keys that differ where activations differ in shape. arrived: the sends that
        have arrived before each F or B (`schedule.arrivals`)."""
        self._stages, self._ranks, self._axis = stages, stages.ranks, stages.mesh.pp
        self._actions, self._calls, self._batches, self._shapes = actions, calls, batches, shapes
        self._arrived = arrived
        self._graph = torch.is_grad_enabled()
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._weights: dict[tuple[int, int], Callable[[], None] | None] = {}  # the functions for W
        self._sending: dict[Action, list[tuple[Work, Tensor]]] = {}
        self._action: Action | None = None

    def __iter__(self) -> Iterator[Action]:
        observer = OBSERVER.get()
        for action in self._actions:
            self._action = action
            if observer is not None:
                observer.action(action)
            yield action

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._end_sends([*self._sending])
        elif len(self._ranks) > 1 and self._action is not None and self._action.microbatch is not None:
            stage, microbatch = self._action.stage, self._action.microbatch
            error.add_note(f"in pipeline stage {stage}, micro-batch {microbatch} of the step")

    def run(self) -> None:
        """Perform all actions but R and U, the end of a step."""
        perform: dict[str, Callable[[Action], None]] = {
            "F": self.forward,
            "B": self.backward,
            "W": self.weight_gradients,
            **dict.fromkeys(("SA", "SG"), self.send),
            **dict.fromkeys(("RA", "RG"), self.receive),
        }
        with self:
            for action in self:
                if action.op in perform:
                    perform[action.op](action)

    def _pass(self, stage: int, microbatch: int | None) -> _Pass:
        return self._passes.setdefault((stage, microbatch or 0), _Pass())

    def forward(self, action: Action) -> None:
        """F: call the model as this stage."""
        stage, i = action.stage, action.microbatch or 0
        here, batch = self._pass(stage, i), self._batches[i]
        self._wait(here.arriving, action)
        self._calls.enter(action)
        output = self._stages.run[stage](lambda: self._calls.forward(batch), here.value)
        here.value = None
        # autograd keeps the numbers that the backward needs: here only the gradients are of use now
        for tensor in here.received:
            tensor.data = placeholder(tensor, tensor.device, tensor.dtype)
        if stage == len(self._ranks) - 1:
            here.loss = self._calls.loss(batch, output)
            return
        here.form, here.output = flatten(output)
        if self._ranks[stage + 1] == self._axis.rank:
            self._accept(stage + 1, i, here.form, [tensor.detach() for tensor in here.output])

    def _accept(self, stage: int, i: int, form: Any, tensors: Sequence[Tensor]) -> None:
        """Give a stage the value of the previous one."""
        there = self._pass(stage, i)
        there.value = unflatten(form, tensors)
        there.received = [t for t in flatten(there.value)[1] if t.requires_grad]

    def backward(self, action: Action) -> None:
        """B: differentiate this stage; or perform the first half of that, if the row has its W."""
        stage, i = action.stage, action.microbatch or 0
        here = self._pass(stage, i)
        assert self._calls.root is not None and self._calls.differentiate is not None
        self._calls.enter(action)
        if stage == len(self._ranks) - 1:
            root, here.loss = self._calls.root(self._batches[i], here.loss), None
            self._weights[stage, i] = self._calls.differentiate(stage, [root], [None])
        else:
            self._wait(here.arriving, action)
            self._weights[stage, i] = self._calls.differentiate(
                stage, _differentiable(here.output), here.gradients
            )
        if stage and self._ranks[stage - 1] == self._axis.rank:
            self._pass(stage - 1, i).gradients = _gradients(here.received)
        if not stage or self._ranks[stage - 1] == self._axis.rank:
            del self._passes[stage, i]
        else:
            here.output = []

    def weight_gradients(self, action: Action) -> None:
        """W: the second half of a backward."""
        compute = self._weights.pop((action.stage, action.microbatch or 0))
        assert compute is not None
        compute()

    def _key(self, stage: int, action: Action) -> tuple[int, Hashable]:
        """The key of `Stages.forms` for the value that a stage hands on."""
        return stage, (self._shapes[action.microbatch or 0] if self._shapes else None, self._graph)

    def send(self, action: Action) -> None:
        """SA, SG: begin to send activations to the next stage's rank, or their gradients back."""
        if action.op == "SG":
            here = self._passes.pop((action.stage, action.microbatch or 0))
            self._post(_gradients(here.received), self._ranks[action.stage - 1], action)
            return
        here, to = self._pass(action.stage, action.microbatch), self._ranks[action.stage + 1]
        if (key := self._key(action.stage, action)) not in self._stages.forms:
            self._stages.forms[key] = here.form
            self._axis.send_object(here.form, to)
        elif self._stages.forms[key] != here.form:
            raise ModelError(
                f"stage {action.stage} hands on other shapes, dtypes or constants "
                "than for an earlier batch of the same shape; a pipeline "
                "needs what goes from block to block to follow from the "
                "shapes of the batch alone: pad it, or set mesh.pp = 1"
            )
        self._post([tensor.detach() for tensor in here.output], to, action)

    def receive(self, action: Action) -> None:
        """RA, RG: begin to receive activations from the previous stage's rank, or their gradients from the
        next one's."""
        if action.op == "RG":
            self._receive_gradient(action)
            return
        before, forms = action.stage - 1, self._stages.forms
        if (key := self._key(before, action)) not in forms:
            forms[key] = self._stages.mesh.receive_object(
                self._axis, self._ranks[before], lambda: self._expected(action)
            )
        form = forms[key]
        tensors = buffers(form, self._stages.mesh.device)
        self._pass(action.stage, action.microbatch).arriving = [
            self._axis.receive(tensor, self._ranks[before]) for tensor in tensors
        ]
        self._accept(action.stage, action.microbatch or 0, form, tensors)

    def _expected(self, action: Action) -> Any:
        """The form of the previous stage's value, where the rank that has it is simulated."""
        forward, batch = self._calls.look or self._calls.forward, self._batches[action.microbatch or 0]
        return flatten(self._stages.run[action.stage].expected(lambda: forward(batch)))[0]

    def _receive_gradient(self, action: Action) -> None:
        here = self._pass(action.stage, action.microbatch)
        here.gradients = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in _differentiable(here.output)
        ]
        here.arriving = [
            self._axis.receive(gradient, self._ranks[action.stage + 1]) for gradient in here.gradients
        ]

    def _post(self, tensors: Sequence[Tensor], to: int, action: Action) -> None:
        whole = [tensor.contiguous() for tensor in tensors]
        self._sending[action] = [(self._axis.send(tensor, to), tensor) for tensor in whole]

    def _wait(self, arriving: list[Work], action: Action) -> None:
        """Wait for what an F or B needs, and let go of what that shows to have arrived elsewhere."""
        while arriving:
            arriving.pop(0).wait()
        self._end_sends(self._arrived.get(action, ()))

    def _end_sends(self, sends: Iterable[Action]) -> None:
        for send in sends:
            for work, _ in self._sending.pop(send, ()):
                work.settle()


def _differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _gradients(received: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the tensors that a stage received; zeros for those that it did not use."""
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received]
