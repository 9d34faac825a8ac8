"""Parameters that an engine trains. Their gradients go to its buckets; whoever reads `.grad` meanwhile is
told where they are, instead of finding None.

Invariant: in a backward `.grad` is torch's own (hooks read it), and so it is where no gradient is pending:
one that a script sets there stands for a backward.
Hooks of the user's come before the one that takes the gradient away. Operators know no difference from
`nn.Parameter`. No communication."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from polyreme.distributed.world import current
from polyreme.errors import ModelError, warn

OWN_GRAD: Any = Tensor.grad
"""The attribute as torch has it: `OWN_GRAD.__get__(parameter)`, `OWN_GRAD.__set__(parameter, None)`."""


class Owner(Protocol):
    """What has the gradients of parameters."""

    begun: bool
    """Whether it has some that are not applied yet."""
    given: set[Tensor]
    """Parameters whose gradients a script set, and no step has taken."""


@dataclass(eq=False)
class Reading:
    """What becomes of reading `.grad` between backward and step. instead: what has it. hidden: it is None,
    with one warning, and not an error, but for torch's own functions that clip, unscale or apply gradients.
    told: the warning was given."""

    instead: str
    hidden: bool = False
    told: bool = False

    def answer(self, parameter: Tensor, caller: str) -> None:
        """Raise ModelError or warn, where the module `caller` reads."""
        text = (
            f"{name_of(parameter)}.grad is read between backward and step, but the engine keeps "
            f"gradients in its buckets, summed over the ranks only at the end of the step: {self.instead}"
        )
        # torch.optim.optimizer is zero_grad, which finds nothing to drop
        if not self.hidden or (caller.startswith("torch.") and caller != "torch.optim.optimizer"):
            raise ModelError(text)
        if not self.told:
            self.told = True
            warn(f"{text}. Here it is None, that of every parameter")


OURS = Reading(
    "to clip, set optimizer.clip, or call engine.gradients().clip_(max_norm); to read them, use "
    "engine.gradients() or a hook (parameter.register_hook); to drop them, engine.zero_grad(); to update, "
    "engine.step()"
)


def _nobody() -> None:
    return None


@dataclass(eq=False)
class ParameterRecord:
    """What is known of one parameter. It keeps neither the parameter nor who has it: `owner`, `engine` and
    `unit` are weak references."""

    name: str = "?"
    """What it is called, for errors."""
    owner: Callable[[], Owner | None] = _nobody
    engine: Callable[[], Any] = _nobody
    """That it was given to."""
    unit: Callable[[], Any] = _nobody
    """What is told of its uses behind the forward of its block."""
    share: Any = None
    """What a rank has of one that was divided as it was made."""
    reading: Reading = OURS
    """What becomes of reading its pending gradient."""
    listed: bool = False
    """Whether `state_dict()` holds it while it is released."""
    closed: bool = False
    """Whether an engine that is closed had it divided."""


class ParameterRecords:
    """The records of a world, each for as long as its parameter is there."""

    def __init__(self) -> None:
        self.known: WeakIdKeyDictionary = WeakTensorKeyDictionary()

    def close(self) -> None:
        """Parameters outlive their world: the next one has their records."""
        current().of(ParameterRecords).known.update(self.known)


_UNKNOWN = ParameterRecord()


def record_of(parameter: Tensor) -> ParameterRecord:
    """What is known of a parameter, to be read."""
    found: ParameterRecord = current().of(ParameterRecords).known.get(parameter, _UNKNOWN)
    return found


def recorded(parameters: Iterable[Tensor]) -> list[ParameterRecord]:
    """The records of parameters, which are made where there are none."""
    known = current().of(ParameterRecords).known
    return [known.setdefault(parameter, ParameterRecord()) for parameter in parameters]


def name_of(parameter: Tensor) -> str:
    """What a parameter is called; "?" if it is in no bucket."""
    return record_of(parameter).name


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_pending(parameter: Tensor) -> bool:
    """Whether an engine has gradients of the parameter that are not applied yet."""
    owner = record_of(parameter).owner()
    return owner is not None and owner.begun


def is_trained(parameter: Tensor) -> bool:
    """Whether an engine that is there trains it."""
    return type(parameter) not in (nn.Parameter, Tensor) and record_of(parameter).owner() is not None


class TrainedParameter(nn.Parameter):
    """The class of a parameter whose gradients an engine takes."""

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = OWN_GRAD.__get__(self)
        # torch.compile asks whether there is one of each tensor that it meets
        if in_backward() or TracingContext.try_get() is not None:
            return gradient
        record, caller = record_of(self), sys._getframe(1).f_globals.get("__name__", "")
        owner, reading = record.owner(), record.reading
        if owner is not None and owner.begun:
            reading.answer(self, caller)
        elif owner is not None and caller == "torch.nn.utils.clip_grad" and not owner.given:
            raise ModelError(
                f"there is no gradient of {record.name} to clip, as no backward has come since the "
                "last step: call engine.backward(loss) before. Between backward and step the engine keeps "
                f"gradients in its buckets: {reading.instead}"
            )
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        record = record_of(self)
        owner = record.owner()
        if owner is not None and not in_backward():
            if gradient is None and (not owner.begun or record.reading.hidden):
                owner.given.discard(self)
            elif gradient is None:
                raise ModelError(
                    f"{record.name}.grad is set to None between backward and step, but the engine "
                    "keeps gradients in its buckets: to drop all, call engine.zero_grad(); to drop one, "
                    'engine.gradients().scale_({"name": 0.0}), or detach it in the forward'
                )
            elif owner.begun:
                raise ModelError(
                    f"{record.name}.grad is set between backward and step, but the engine keeps "
                    "gradients in its buckets: put what you want in the loss, change gradients in a hook "
                    "(parameter.register_hook), scale them by engine.gradients().scale_(factors), or set "
                    'them by engine.numbers(parameter).set_whole("gradient", value)'
                )
            else:
                owner.given.add(self)
        OWN_GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(Tensor.detach(self), self.requires_grad))

    def detach(self) -> Tensor:
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise ModelError(
                f"nn.Parameter(...) of parameter {name_of(self)}, which an engine trains: make it "
                "of a copy of its numbers, nn.Parameter(p.detach().clone()), and call engine.refresh(); "
                "weight_norm and other parametrizations belong before initialize"
            )
        return super().detach()

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        handle: RemovableHandle = super().register_post_accumulate_grad_hook(hook)
        hooks: Any = self._post_accumulate_grad_hooks
        for key in [
            key for key, each in hooks.items() if getattr(each, "takes_gradient", False) and each is not hook
        ]:
            hooks[key] = hooks.pop(key)
        return handle


def name(parameters: Iterable[nn.Parameter], names: Iterable[str]) -> None:
    """Note what parameters are called, for errors."""
    for record, each in zip(recorded(parameters), names, strict=True):
        record.name = each


def own(parameters: Iterable[nn.Parameter], owner: Owner) -> None:
    """Give `owner` their gradients from now on."""
    for parameter, record in zip(held := [*parameters], recorded(held), strict=True):
        if type(parameter) is nn.Parameter:
            parameter.__class__ = TrainedParameter
        record.owner = ref(owner)


def read_as(parameters: Iterable[nn.Parameter], reading: Reading) -> None:
    """Say what becomes of reading their `.grad` between backward and step."""
    for record in recorded(parameters):
        record.reading = reading


def give_to(engine: object, module: nn.Module) -> None:
    """Note which engine has the module's parameters."""
    for record in recorded(module.parameters()):
        record.engine = ref(engine)


def engine_of(parameter: Tensor) -> Any:
    """The engine that a parameter was given to; None for any other."""
    return record_of(parameter).engine()


def disown(parameters: Iterable[nn.Parameter], whole: bool) -> None:
    """Make them plain parameters again, if they are `whole`: their engine is closed."""
    for parameter, record in zip(held := [*parameters], recorded(held), strict=True):
        record.owner = record.engine = _nobody
        record.reading, record.closed = OURS, not whole
        if whole and type(parameter) is TrainedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def refuse_owned(module: nn.Module) -> None:
    """Raise ModelError for a parameter of another engine that is still there, or of which a closed one has
    left a shard."""
    parameters = dict(module.named_parameters())
    if parts := [name for name, parameter in parameters.items() if record_of(parameter).closed]:
        raise ModelError(
            f"{parts[0]} was divided by an engine that is closed, so that its numbers are not whole here: "
            "build the model anew, and load what engine.save wrote. Without mesh.tp and mesh.pp, "
            "engine.close(gather=True) leaves it whole"
        )
    if any(engine_of(parameter) is not None for parameter in parameters.values()):
        gc.collect()  # it may be gone, but for cycles
    for name, parameter in parameters.items():
        if engine_of(parameter) is not None:
            raise ModelError(
                f"{name} belongs to another engine, which holds its numbers: "
                "call engine.close(gather=True) of that one first (as where a notebook's cell runs again), "
                "give this one a model of its own (copy.deepcopy inside the "
                "other's full_parameters()), or train what both "
                "share in one engine, with the sum of the losses"
            )
