"""Parameters of engines: one record of each, in the registry of the world, and one class that asks it.

Invariants: in a backward `.grad` is torch's own (hooks read it), and so it is where no gradient is pending:
one that a script sets there stands for a backward. Hooks of the user's come before the one that takes the
gradient away. Operators of a block's forward cost nothing more, and compiled code knows no difference from
`nn.Parameter`: the class comes in three depths, by how much of what is done with a parameter it looks at, and
what it then does is up to the `State` in the record. No communication."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from polyreme.distributed.world import Part, current
from polyreme.errors import ModelError, warn
from polyreme.models.tensor_access import read

OWN_GRAD: Any = Tensor.grad
"""The attribute as torch has it: `OWN_GRAD.__get__(parameter)`, `OWN_GRAD.__set__(parameter, None)`."""


class Owner(Protocol):
    """What has the gradients of parameters."""

    @property
    def begun(self) -> bool:
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


class State:
    """Where the numbers of a parameter are, and so what may be done with it. Of this class: not in memory
    between their uses."""

    kind: Any
    """The class of such a parameter."""
    there = False
    """Whether the numbers are in the parameter's memory."""

    def refuse(self, what: str, parameter: Tensor) -> None:
        """Raise ModelError: `what` needs the numbers."""
        record = record_of(parameter)
        if record.closed:
            raise ModelError(
                f"{what} of parameter {record.name}, whose engine is closed and had it in shards: "
                "call engine.save, engine.state_dict() or engine.full_parameters() before engine.close()"
            )
        raise ModelError(
            f"{what} of parameter {record.name}, whose "
            "numbers are not in memory between its uses (zero.stage = 3, or "
            "memory.params elsewhere) or until engine.wake(): between steps do it inside "
            "`with engine.full_parameters():` (with write=True to change it), which every rank must enter; "
            "engine.state_dict() gives whole copies of all, and engine.save writes them. A penalty over "
            "weights in a loss is optimizer.weight_decay, or is computed in the model's own forward"
        )

    def before(self, parameter: Tensor, name: str, call: Call, asked: Sequence[Any]) -> Any:
        """Called before a function of this name that needs the numbers of the parameter, and of others that
        are `asked`. Returns what that is to return, or NotImplemented: it is to be called."""
        saved = name == "detach" and record_of(parameter).listed
        if saved and caller().f_code is nn.Module._save_to_state_dict.__code__:
            return parameter
        self.refuse(name, parameter)
        return NotImplemented

    def after(self, result: Any) -> None:
        """Called after it."""

    def taken(self, parameter: Tensor, found: Any) -> Any:
        """What a method is to return that has `found` in the parameter's memory."""
        return found

    def refuse_writing(self, what: str, parameter: Tensor) -> None:
        """Raise ModelError where `what` would be lost."""


class Whole(State):
    """The numbers are in memory, and stay: everything may be done with them."""

    there = True

    def refuse(self, what: str, parameter: Tensor) -> None: ...


Check = Callable[[str, Sequence[Any], dict[str, Any], str], None]
"""What gets the name of a function, its arguments, and the name of a parameter whose numbers it needs."""
Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]
"""A function of torch, and what it is called with."""
WHOLE, RELEASED = Whole(), State()


class Presence:
    """The state of parameters that come and go together."""

    def __init__(self, named: Iterable[tuple[nn.Parameter, str]] = ()) -> None:
        """named: the parameters, and what they are called."""
        self.state: State = WHOLE
        for parameter, name in named:
            record = record_of(parameter)
            record.name, record.presence = name, self

    def become(self, state: State, parameters: Iterable[nn.Parameter]) -> None:
        """Have the parameters, which are all that this is of, be in a state."""
        kind, before, self.state = state.kind, self.state.kind, state
        if kind is not before:
            for parameter in parameters:
                parameter.__class__ = kind


def _nobody() -> None: ...


@dataclass(eq=False)
class ParameterRecord:
    """What is known of one parameter. It keeps neither the parameter nor who has it: `owner` and `engine` are
    weak references."""

    name: str = "?"
    """What it is called, for errors."""
    presence: Presence = field(default_factory=Presence)
    owner: Callable[[], Owner | None] = _nobody
    """What has its gradients."""
    engine: Callable[[], Any] = _nobody
    """That it was given to."""
    reading: Reading = OURS
    """What becomes of reading its pending gradient."""
    listed: bool = False
    """Whether `state_dict()` holds the parameter itself while it is released, which raises ModelError where
    its numbers are used: scripts ask for one to know its names, too."""
    closed: bool = False
    """Whether an engine that is closed had it divided."""
    check: Check | None = None
    """What a `Restriction` has called before what needs its numbers."""


class ParameterRecords(WeakIdKeyDictionary, Part):
    """The records of a world, each for as long as its parameter is there."""

    def close(self) -> None:
        """Parameters outlive their world: the next one has their records."""
        current().of(ParameterRecords).update(self)


def record_of(parameter: Tensor) -> ParameterRecord:
    """What is known of a parameter."""
    known = current().of(ParameterRecords)
    found: ParameterRecord | None = known.get(parameter)
    if found is None:
        known[parameter] = found = ParameterRecord()
    return found


def name_of(parameter: Tensor) -> str:
    """What a parameter is called; "?" if it is in no bucket."""
    return record_of(parameter).name


def state_of(parameter: Tensor) -> State:
    """Where its numbers are."""
    return record_of(parameter).presence.state if isinstance(parameter, FollowedParameter) else WHOLE


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_trained(parameter: Tensor) -> bool:
    """Whether an engine that is there trains it."""
    return type(parameter) not in (nn.Parameter, Tensor) and record_of(parameter).owner() is not None


def caller() -> FrameType:
    """The frame that calls a method of a parameter."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in METHODS:
        frame = frame.f_back
    found: FrameType = frame
    return found


METHODS = (__name__, "polyreme.zero.released")
"""Modules whose functions are methods of parameters."""


class TrainedParameter(nn.Parameter):
    """The class of a parameter that an engine has. Of this depth only its gradient is looked at."""

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = OWN_GRAD.__get__(self)
        # torch.compile asks whether there is one of each tensor that it meets
        if in_backward() or TracingContext.try_get() is not None:
            return gradient
        record, asking = record_of(self), caller().f_globals.get("__name__", "")
        owner = record.owner()
        if owner is not None and owner.begun:
            record.reading.answer(self, asking)
        elif owner is not None and asking == "torch.nn.utils.clip_grad" and not owner.given:
            raise ModelError(
                f"there is no gradient of {record.name} to clip, as no backward has come since the "
                "last step: call engine.backward(loss) before. Between backward and step the engine keeps "
                f"gradients in its buckets: {record.reading.instead}"
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


class FollowedParameter(TrainedParameter):
    """The same where what shares the parameter's memory is looked at, too."""


def _follows(name: str) -> Callable[..., Any]:
    def method(self: FollowedParameter, *args: Any, **kwargs: Any) -> Any:
        return state_of(self).taken(self, getattr(Tensor, name)(self, *args, **kwargs))

    return method


def _follows_attribute(name: str) -> property:
    def write(self: FollowedParameter, value: Tensor) -> None:
        state_of(self).refuse_writing(f"{name} =", self)
        getattr(Tensor, name).__set__(self, value)

    return property(lambda self: state_of(self).taken(self, getattr(Tensor, name).__get__(self)), write)


for _name in (
    *("detach", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten"),
    *("t", "transpose", "permute", "movedim", "swapaxes", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("__getitem__", "narrow", "select", "diagonal", "unfold", "as_strided"),
    *("unbind", "chunk", "split", "tensor_split", "__iter__"),
):  # methods whose result may share the tensor's memory
    setattr(FollowedParameter, _name, _follows(_name))
for _name in ("data", "T", "mT", "H", "mH"):
    setattr(FollowedParameter, _name, _follows_attribute(_name))


class WatchedParameter(FollowedParameter):
    """The same where all that needs the parameter's numbers is looked at."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, leaves = read(func, args, kwargs)
        asked = [(leaf, record_of(leaf)) for leaf in leaves if isinstance(leaf, WatchedParameter)]
        for parameter, record in asked:
            call = (func, args, kwargs or {})
            if record.check is not None:
                record.check(str(name), *call[1:], record.name)
            answer = record.presence.state.before(parameter, str(name), call, [each for each, _ in asked])
            if answer is not NotImplemented:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        for _, record in asked:
            record.presence.state.after(result)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if state_of(self).there:
            return super().__repr__()
        return (
            f"Parameter containing: (released, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if state_of(self).there else format(repr(self), spec)


def _refusing(name: str, what: str) -> Callable[..., Any]:
    def method(self: WatchedParameter, *args: Any, **kwargs: Any) -> Any:
        state_of(self).refuse(what, self)
        return getattr(TrainedParameter, name)(self, *args, **kwargs)

    return method


for _name, _what in (
    ("__deepcopy__", "copy.deepcopy"),
    ("__reduce_ex__", "pickling (torch.save, copy.copy)"),
    ("__dlpack__", "__dlpack__"),
):
    setattr(WatchedParameter, _name, _refusing(_name, _what))
State.kind, Whole.kind = WatchedParameter, TrainedParameter


class Restriction:
    """Has `check` called before what needs the numbers of parameters, from `refuse` to `allow`."""

    def __init__(self, parameters: Iterable[nn.Parameter], check: Check) -> None:
        self._held = [(parameter, record_of(parameter)) for parameter in parameters]
        self._check = check
        self._kinds: list[Any] = []  # their classes before

    def refuse(self) -> None:
        """May be called again meanwhile."""
        self.allow()
        self._kinds = [type(parameter) for parameter, _ in self._held]
        for parameter, record in self._held:
            parameter.__class__, record.check = WatchedParameter, self._check

    def allow(self, *_: object) -> None:
        """Leaves the classes alone of those that have changed their state."""
        for (parameter, record), kind in zip(self._held, self._kinds, strict=False):
            record.check, state = None, record.presence.state
            if type(parameter) is WatchedParameter:
                parameter.__class__ = kind if state is WHOLE else state.kind
        self._kinds = []

    __enter__, __exit__ = refuse, allow


def set_apart(parameter: nn.Parameter) -> None:
    """Have one be whole by itself, apart from those that it came and went with."""
    parameter.__class__ = TrainedParameter
    record_of(parameter).presence = Presence()


def own(parameters: Iterable[nn.Parameter], owner: Owner) -> None:
    """Give `owner` their gradients from now on."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = TrainedParameter
        record_of(parameter).owner = ref(owner)


def give_to(engine: object, module: nn.Module) -> None:
    """Note which engine has the module's parameters."""
    for parameter in module.parameters():
        record_of(parameter).engine = ref(engine)


def engine_of(parameter: Tensor) -> Any:
    """The engine that a parameter was given to; None for any other."""
    return record_of(parameter).engine()


def disown(parameters: Iterable[nn.Parameter], whole: bool) -> None:
    """Make them plain parameters again, if they are `whole`: their engine is closed."""
    for parameter in parameters:
        record = record_of(parameter)
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
