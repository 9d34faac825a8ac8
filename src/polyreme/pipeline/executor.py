"""The interpreter: what each action of a schedule's row does. The only step path of the engine.

Invariant: a micro-batch's tensors are kept from its forward to its backward at a stage, and no longer, but
for what a W needs of them; what arrives is used by the stage that the table names. The shapes of what crosses
a cut are sent once for each shape of batch, before the first such tensor.

Communication: activations to the next stage's rank, their gradients back; nothing between stages of one rank.
Sends are not waited for before the row ends, receives not before their value is needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.distributed.work import Work
from polyreme.errors import ModelError
from polyreme.pipeline.activation_spec import buffers, flatten, unflatten
from polyreme.pipeline.placeholders import placeholder
from polyreme.pipeline.schedule import Action


class RunStage(Protocol):
    """Runs one stage: `stage.Stage`, or for a model in one piece `Whole`."""

    def __call__(self, forward: Callable[[], Any], received: Any) -> Any:
        """Call a forward as this stage, with what the stage before handed on."""

    def expected(self, forward: Callable[[], Any]) -> Any:
        """What the stage before hands on in a forward, but for its numbers."""


class Whole:
    """The only stage of a model that is not cut."""

    def __call__(self, forward: Callable[[], Any], received: Any) -> Any:
        return forward()

    def expected(self, forward: Callable[[], Any]) -> Any:
        return None


@dataclass(frozen=True)
class Calls:
    """What the actions do with a micro-batch.

    enter(action) comes before a forward or backward. forward(batch) calls the model. loss(batch, output)
    takes note of the last stage's output; root(batch, loss) is what its backward begins with, from what that
    returned. differentiate(stage, roots, gradients) is a backward; where the table has W, it returns what W
    does. look(batch) calls the model beside training. The last three are None where there is no backward."""

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
    """The stages of a model. ranks: the rank on the mesh's pp of each; run: how to run those of this rank;
    forms: of what a stage hands on, for each shape of batch."""

    ranks: Sequence[int]
    mesh: Mesh
    run: Mapping[int, RunStage]
    forms: dict[tuple[int, Hashable], Any] = field(default_factory=dict)


@dataclass
class _Pass:
    """One micro-batch at one stage. Tensors are those of floating point that a backward goes through, or all
    of them in `output`."""

    received: list[Tensor] = field(default_factory=list)
    value: Any = None  # what was received, as the model takes it
    form: Any = None
    output: list[Tensor] = field(default_factory=list)
    loss: Any = None
    gradients: list[Tensor] = field(default_factory=list)  # gradients of the output, as received
    arriving: list[Work] = field(default_factory=list)


class Row:
    """A row under way on this rank: its actions one by one, for each of which the method of its kind is to be
    called before the next one. `with` waits at its end for what was sent."""

    def __init__(
        self,
        stages: Stages,
        actions: Iterable[Action],
        calls: Calls,
        batches: Sequence[Any],
        shapes: Sequence[Hashable] = (),
    ) -> None:
        """`shapes`, by micro-batch, tell those apart whose activations differ in shape."""
        self._stages, self._ranks, self._axis = stages, stages.ranks, stages.mesh.pp
        self._actions, self._calls, self._batches, self._shapes = actions, calls, batches, shapes
        self._graph = torch.is_grad_enabled()
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._weights: dict[tuple[int, int], Callable[[], None] | None] = {}  # what W does
        self._sending: list[tuple[Work, Tensor]] = []
        self._action: Action | None = None

    def __iter__(self) -> Iterator[Action]:
        for action in self._actions:
            self._action = action
            yield action

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            while self._sending:
                self._sending.pop()[0].settle()
        elif len(self._ranks) > 1 and self._action is not None and self._action.microbatch is not None:
            stage, microbatch = self._action.stage, self._action.microbatch
            error.add_note(f"in pipeline stage {stage}, micro-batch {microbatch} of the step")

    def run(self) -> None:
        """Perform every action but the end of a step, R and U."""
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
        _wait(here.arriving)
        self._calls.enter(action)
        output = self._stages.run[stage](lambda: self._calls.forward(batch), here.value)
        here.value = None
        # its numbers are with whoever needs them for the backward: here only its gradient is of use now
        for tensor in here.received:
            tensor.data = placeholder(tensor, tensor.device, tensor.dtype)
        if stage == len(self._ranks) - 1:
            here.loss = self._calls.loss(batch, output)
            return
        here.form, here.output = flatten(output)
        if self._ranks[stage + 1] == self._axis.rank:
            self._accept(stage + 1, i, here.form, [tensor.detach() for tensor in here.output])

    def _accept(self, stage: int, i: int, form: Any, tensors: Sequence[Tensor]) -> None:
        """Give a stage what the one before it hands on."""
        there = self._pass(stage, i)
        there.value = unflatten(form, tensors)
        there.received = [t for t in flatten(there.value)[1] if t.requires_grad]

    def backward(self, action: Action) -> None:
        """B: differentiate this stage, or its first half."""
        stage, i = action.stage, action.microbatch or 0
        here = self._pass(stage, i)
        assert self._calls.root is not None and self._calls.differentiate is not None
        self._calls.enter(action)
        if stage == len(self._ranks) - 1:
            root, here.loss = self._calls.root(self._batches[i], here.loss), None
            self._weights[stage, i] = self._calls.differentiate(stage, [root], [None])
        else:
            _wait(here.arriving)
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
        """What the form depends on that a stage hands on."""
        return stage, (self._shapes[action.microbatch or 0] if self._shapes else None, self._graph)

    def send(self, action: Action) -> None:
        """SA, SG: begin to send activations to the next stage's rank, or their gradients back."""
        if action.op == "SG":
            here = self._passes.pop((action.stage, action.microbatch or 0))
            self._post(_gradients(here.received), self._ranks[action.stage - 1])
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
        self._post([tensor.detach() for tensor in here.output], to)

    def receive(self, action: Action) -> None:
        """RA, RG: begin to receive what the other end of SA or SG sends."""
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
        """The form of what the stage before hands on."""
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

    def _post(self, tensors: Sequence[Tensor], to: int) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            self._sending.append((self._axis.send(whole, to), whole))


def _wait(works: list[Work]) -> None:
    while works:
        works.pop(0).wait()


def _differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _gradients(received: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of what a stage received; zero for what it did not use."""
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received]
