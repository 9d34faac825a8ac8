"""The interpreter: executes a row of a schedule, action by action. The only step path of the engine.

Invariant: a micro-batch's tensors are kept from its forward to its backward at a stage, and no longer, but
for what a W needs of them; what arrives is used by the stage that the table names. The shapes of what crosses
a cut are sent once for each shape of batch, before the first such tensor.

Communication: activations to the next stage's rank, their gradients back; nothing between stages of one rank.
Sends are not waited for before the row ends, receives not before their value is needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.distributed.work import Work
from polyreme.errors import ModelError
from polyreme.pipeline.activation_spec import buffers, flatten, unflatten
from polyreme.pipeline.placeholders import placeholder
from polyreme.pipeline.schedule import Action

RunStage = Callable[[Callable[[], Any], Any], Any]
"""Calls a forward as one stage, with what the stage before handed on: `stage.Stage`, or for a model in one
piece `whole`."""


def whole(forward: Callable[[], Any], received: Any) -> Any:
    """The only stage of a model that is not cut."""
    return forward()


@dataclass(frozen=True)
class Calls:
    """What the actions do with micro-batch i.

    enter(stage, i) comes before a forward or backward. forward(i) calls the model. loss(i, output) takes note
    of the last stage's output; root(i) is what its backward begins with. differentiate(stage, roots,
    gradients) is a backward; where the table has W, it returns what that does. update() ends the row. The
    last three are None where there is no backward."""

    enter: Callable[[int, int], None]
    forward: Callable[[int], Any]
    loss: Callable[[int, Any], None]
    root: Callable[[int], Tensor] | None = None
    differentiate: (
        Callable[[int, Sequence[Tensor], Sequence[Tensor | None]], Callable[[], None] | None] | None
    ) = None
    update: Callable[[], None] | None = None


@dataclass
class _Pass:
    """One micro-batch at one stage. Tensors are those of floating point that a backward goes through, or all
    of them in `output`."""

    received: list[Tensor] = field(default_factory=list)
    value: Any = None  # what was received, as the model takes it
    form: Any = None
    output: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # gradients of the output, as received
    arriving: list[Work] = field(default_factory=list)


class Runner:
    """Runs rows on this rank. `ranks` has the rank on `axis` of each stage, `stages` how to run those of this
    rank."""

    def __init__(
        self, ranks: Sequence[int], axis: Axis, device: torch.device, stages: Mapping[int, RunStage]
    ) -> None:
        self._ranks, self._axis, self._device, self._stages = ranks, axis, device, stages
        # forms of what a stage hands on, for each shape of batch
        self._forms: dict[tuple[int, Hashable], Any] = {}
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._weights: dict[tuple[int, int], Callable[[], None] | None] = {}  # what W does
        self._sending: list[tuple[Work, Tensor]] = []
        self._shapes: Sequence[Hashable] = ()
        self._graph = False
        self._calls: Calls

    def run(self, row: Sequence[Action], calls: Calls, shapes: Sequence[Hashable] = ()) -> None:
        """Perform every action of `row`. `shapes`, by micro-batch, tell those apart whose activations differ
        in shape."""
        self._calls, self._shapes, self._graph = calls, shapes, torch.is_grad_enabled()
        self._passes.clear()
        self._weights.clear()
        perform = {
            "F": self._forward,
            "B": self._backward,
            "W": self._weigh,
            "SA": self._send,
            "RA": self._receive,
            "SG": self._send_gradient,
            "RG": self._receive_gradient,
            "R": lambda action: None,
            "U": self._update,
        }
        for action in row:  # R: a stage's last backward has reduced its gradients
            try:
                perform[action.op](action)
            except Exception as error:
                if len(self._ranks) > 1 and action.microbatch is not None:
                    error.add_note(
                        f"in pipeline stage {action.stage}, micro-batch {action.microbatch} of the step"
                    )
                raise
        while self._sending:
            self._sending.pop()[0].settle()
        self._passes.clear()
        del self._calls  # it holds the batch

    def _pass(self, stage: int, microbatch: int | None) -> _Pass:
        return self._passes.setdefault((stage, microbatch or 0), _Pass())

    def _forward(self, action: Action) -> None:
        stage, i = action.stage, action.microbatch or 0
        here = self._pass(stage, i)
        _wait(here.arriving)
        self._calls.enter(stage, i)
        output = self._stages[stage](lambda: self._calls.forward(i), here.value)
        here.value = None
        # its numbers are with whoever needs them for the backward: here only its gradient is of use now
        for tensor in here.received:
            tensor.data = placeholder(tensor, tensor.device, tensor.dtype)
        if stage == len(self._ranks) - 1:
            self._calls.loss(i, output)
            return
        here.form, here.output = flatten(output)
        if self._ranks[stage + 1] == self._axis.rank:
            self._accept(stage + 1, i, here.form, [tensor.detach() for tensor in here.output])

    def _accept(self, stage: int, i: int, form: Any, tensors: Sequence[Tensor]) -> None:
        """Give a stage what the one before it hands on."""
        there = self._pass(stage, i)
        there.value = unflatten(form, tensors)
        there.received = [t for t in flatten(there.value)[1] if t.requires_grad]

    def _backward(self, action: Action) -> None:
        stage, i = action.stage, action.microbatch or 0
        here = self._pass(stage, i)
        assert self._calls.root is not None and self._calls.differentiate is not None
        self._calls.enter(stage, i)
        if stage == len(self._ranks) - 1:
            self._weights[stage, i] = self._calls.differentiate(stage, [self._calls.root(i)], [None])
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

    def _weigh(self, action: Action) -> None:
        compute = self._weights.pop((action.stage, action.microbatch or 0))
        assert compute is not None
        compute()

    def _key(self, stage: int, action: Action) -> tuple[int, Hashable]:
        """What the form depends on that a stage hands on."""
        return stage, (self._shapes[action.microbatch or 0] if self._shapes else None, self._graph)

    def _send(self, action: Action) -> None:
        here, to = self._pass(action.stage, action.microbatch), self._ranks[action.stage + 1]
        if (key := self._key(action.stage, action)) not in self._forms:
            self._forms[key] = here.form
            self._axis.send_object(here.form, to)
        elif self._forms[key] != here.form:
            raise ModelError(
                f"stage {action.stage} hands on other shapes, dtypes or constants "
                "than for an earlier batch of the same shape; a pipeline "
                "needs what goes from block to block to follow from the "
                "shapes of the batch alone: pad it, or set mesh.pp = 1"
            )
        self._post([tensor.detach() for tensor in here.output], to)

    def _receive(self, action: Action) -> None:
        before = action.stage - 1
        if (key := self._key(before, action)) not in self._forms:
            self._forms[key] = self._axis.receive_object(self._ranks[before])
        form = self._forms[key]
        tensors = buffers(form, self._device)
        self._pass(action.stage, action.microbatch).arriving = [
            self._axis.receive(tensor, self._ranks[before]) for tensor in tensors
        ]
        self._accept(action.stage, action.microbatch or 0, form, tensors)

    def _send_gradient(self, action: Action) -> None:
        here = self._passes.pop((action.stage, action.microbatch or 0))
        self._post(_gradients(here.received), self._ranks[action.stage - 1])

    def _receive_gradient(self, action: Action) -> None:
        here = self._pass(action.stage, action.microbatch)
        here.gradients = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in _differentiable(here.output)
        ]
        here.arriving = [
            self._axis.receive(gradient, self._ranks[action.stage + 1]) for gradient in here.gradients
        ]

    def _update(self, action: Action) -> None:
        if self._calls.update is not None:
            self._calls.update()

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
