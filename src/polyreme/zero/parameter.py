"""Parameters of engines: a record of each, in the registry of the world, and parameter classes that consult
it.

Invariants: within a backward `.grad` is torch's own (hooks read it), and so it is while no gradient is
pending; one that a script sets there stands for a backward. The user's hooks run before the one that takes
the gradient away. Operators of a block's forward cost nothing more, and compiled code sees an `nn.Parameter`:
there are three classes, which intercept more or less of the parameter's use, and act as the `ParameterState`
in the record says. No communication."""

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

from polyreme.distributed.world import Resource, current
from polyreme.errors import ModelError, warn
from polyreme.models.tensor_access import read

OWN_GRAD: Any = Tensor.grad
"""torch's `grad` attribute: `OWN_GRAD.__get__(parameter)`, `OWN_GRAD.__set__(parameter, None)`."""


class GradientOwner(Protocol):
    """The step that has the gradients of parameters."""

    @property
    def begun(self) -> bool:
        """True if it has gradients that are not applied yet."""

    given: set[Tensor]
    """Parameters whose gradients a script set, and that no step has taken."""


@dataclass(eq=False)
class GradReadPolicy:
    """The answer to reading `.grad` between backward and step.

    instead: names the call that has the gradients. hidden: `.grad` is None, with one warning, except for
    torch's own functions that clip, unscale or apply gradients; otherwise an error. warned: the warning was
    given."""

    instead: str
    hidden: bool = False
    warned: bool = False

    def answer(self, parameter: Tensor, caller: str) -> None:
        """Raise ModelError or warn, where the module `caller` reads `.grad`."""
        text = (
            f"{name_of(parameter)}.grad is read between backward and step, but the engine keeps "
            f"gradients in its buckets, summed over the ranks only at the end of the step: {self.instead}"
        )
        # torch.optim.optimizer calls it in zero_grad, which finds nothing to drop
        if not self.hidden or (caller.startswith("torch.") and caller != "torch.optim.optimizer"):
            raise ModelError(text)
        if not self.warned:
            self.warned = True
            warn(f"{text}. Here it is None, that of every parameter")


DEFAULT_GRAD_READS = GradReadPolicy(
    "to clip, set optimizer.clip, or call engine.gradients().clip_(max_norm); to read them, use "
    "engine.gradients() or a hook (parameter.register_hook); to drop them, engine.zero_grad(); to update, "
    "engine.step()"
)


class ParameterState:
    """The place of a parameter's numbers, which decides what may be done with it. This class itself: not in
    memory between uses."""

    kind: Any
    """The parameter's class in this state."""
    there = False
    """True if the numbers are in the parameter's memory."""

    def refuse(self, what: str, parameter: Tensor) -> None:
        """Raise ModelError: `what`, a call, needs numbers that are not in memory."""
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

    def before(self, parameter: Tensor, name: str, call: TorchCall, asked: Sequence[Any]) -> Any:
        """Run before a torch function of this name that needs the numbers of the parameter and of the others
        in `asked`. Returns the function's result, or NotImplemented to have the function called."""
        saved = name == "detach" and record_of(parameter).listed
        if saved and caller().f_code is nn.Module._save_to_state_dict.__code__:
            return parameter
        self.refuse(name, parameter)
        return NotImplemented

    def after(self, result: Any) -> None:
        """Run after such a function, with its result."""

    def taken(self, parameter: Tensor, found: Any) -> Any:
        """Return the result of a method that found `found` in the parameter's memory."""
        return found

    def refuse_writing(self, what: str, parameter: Tensor) -> None:
        """Raise ModelError where the write `what` would be lost."""


class InMemory(ParameterState):
    """The numbers are in memory and stay there; everything is allowed."""

    there = True

    def refuse(self, what: str, parameter: Tensor) -> None: ...


AccessCheck = Callable[[str, Sequence[Any], dict[str, Any], str], None]
"""A callback with a function's name, its arguments, and the name of the parameter whose numbers it needs."""
TorchCall = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]
"""A torch function, its positional arguments and its keyword arguments."""
IN_MEMORY, RELEASED = InMemory(), ParameterState()


class Presence:
    """The common state of parameters that are gathered and released together."""

    def __init__(self, named: Iterable[tuple[nn.Parameter, str]] = ()) -> None:
        """named: pairs of a parameter and its name."""
        self.state: ParameterState = IN_MEMORY
        for parameter, name in named:
            record = record_of(parameter)
            record.name, record.presence = name, self

    def become(self, state: ParameterState, parameters: Iterable[nn.Parameter]) -> None:
        """Set the state. `parameters` are all that share it."""
        kind, before, self.state = state.kind, self.state.kind, state
        if kind is not before:
            for parameter in parameters:
                parameter.__class__ = kind


def _nobody() -> None: ...


@dataclass(eq=False)
class ParameterRecord:
    """The record of one parameter. It keeps neither the parameter nor its engine alive: `owner` and `engine`
    are weak references."""

    name: str = "?"
    """The parameter's name, for errors."""
    presence: Presence = field(default_factory=Presence)
    owner: Callable[[], GradientOwner | None] = _nobody
    """Returns the step that has its gradients."""
    engine: Callable[[], Any] = _nobody
    """Returns the engine that it was given to."""
    grad_reads: GradReadPolicy = DEFAULT_GRAD_READS
    """The answer to reading its pending gradient."""
    listed: bool = False
    """True if `state_dict()` lists the parameter itself while it is released, for scripts that only want
    names; using its numbers raises ModelError."""
    closed: bool = False
    """True if a closed engine left it divided."""
    check: AccessCheck | None = None
    """The callback of a `Restriction`, before anything that needs its numbers."""


class ParameterRecords(WeakIdKeyDictionary, Resource):
    """The records of a world, each for as long as its parameter lives."""

    def close(self) -> None:
        """Hand the records to the next world, as parameters outlive their own."""
        current().of(ParameterRecords).update(self)


def record_of(parameter: Tensor) -> ParameterRecord:
    """Return the record of a parameter."""
    known = current().of(ParameterRecords)
    found: ParameterRecord | None = known.get(parameter)
    if found is None:
        known[parameter] = found = ParameterRecord()
    return found


def name_of(parameter: Tensor) -> str:
    """Return a parameter's name; "?" if it is in no bucket."""
    return record_of(parameter).name


def state_of(parameter: Tensor) -> ParameterState:
    """Return the state of a parameter."""
    return record_of(parameter).presence.state if isinstance(parameter, FollowedParameter) else IN_MEMORY


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_trained(parameter: Tensor) -> bool:
    """Return whether a live engine trains the parameter."""
    return type(parameter) not in (nn.Parameter, Tensor) and record_of(parameter).owner() is not None


def caller() -> FrameType:
    """Return the frame that calls a method of a parameter."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in METHODS:
        frame = frame.f_back
    found: FrameType = frame
    return found


METHODS = (__name__, "polyreme.zero.released")
"""Modules whose frames `caller` skips, as their functions are methods of parameters."""


class TrainedParameter(nn.Parameter):
    """A parameter of an engine. Only access to its gradient is intercepted."""

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = OWN_GRAD.__get__(self)
        # torch.compile asks for the gradient of each tensor that it meets
        if in_backward() or TracingContext.try_get() is not None:
            return gradient
        record, asking = record_of(self), caller().f_globals.get("__name__", "")
        owner = record.owner()
        if owner is not None and owner.begun:
            record.grad_reads.answer(self, asking)
        elif owner is not None and asking == "torch.nn.utils.clip_grad" and not owner.given:
            raise ModelError(
                f"there is no gradient of {record.name} to clip, as no backward has come since the "
                "last step: call engine.backward(loss) before. Between backward and step the engine keeps "
                f"gradients in its buckets: {record.grad_reads.instead}"
            )
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        record = record_of(self)
        owner = record.owner()
        if owner is not None and not in_backward():
            if gradient is None and (not owner.begun or record.grad_reads.hidden):
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
    """A parameter whose memory-sharing results, such as views, are intercepted too."""


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
    """A parameter of which every use of its numbers is intercepted."""

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
ParameterState.kind, InMemory.kind = WatchedParameter, TrainedParameter


class Restriction:
    """Calls `check` before anything that needs the numbers of parameters, from `refuse` to `allow`."""

    def __init__(self, parameters: Iterable[nn.Parameter], check: AccessCheck) -> None:
        self._held = [(parameter, record_of(parameter)) for parameter in parameters]
        self._check = check
        self._kinds: list[Any] = []  # their classes before `refuse`

    def refuse(self) -> None:
        """Begin to call `check`. May be called again."""
        self.allow()
        self._kinds = [type(parameter) for parameter, _ in self._held]
        for parameter, record in self._held:
            parameter.__class__, record.check = WatchedParameter, self._check

    def allow(self, *_: object) -> None:
        """End it. Parameters that have changed their state keep their class."""
        for (parameter, record), kind in zip(self._held, self._kinds, strict=False):
            record.check, state = None, record.presence.state
            if type(parameter) is WatchedParameter:
                parameter.__class__ = kind if state is IN_MEMORY else state.kind
        self._kinds = []

    __enter__, __exit__ = refuse, allow


def set_apart(parameter: nn.Parameter) -> None:
    """Make a parameter whole by itself, apart from those that it was gathered with."""
    parameter.__class__ = TrainedParameter
    record_of(parameter).presence = Presence()


def own(parameters: Iterable[nn.Parameter], owner: GradientOwner) -> None:
    """Give `owner` the gradients of parameters from now on."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = TrainedParameter
        record_of(parameter).owner = ref(owner)


def give_to(engine: object, module: nn.Module) -> None:
    """Record that `engine` has the module's parameters."""
    for parameter in module.parameters():
        record_of(parameter).engine = ref(engine)


def engine_of(parameter: Tensor) -> Any:
    """Return the engine that a parameter was given to; None for any other."""
    return record_of(parameter).engine()


def disown(parameters: Iterable[nn.Parameter], whole: bool) -> None:
    """Make parameters plain again if they are `whole`, as their engine is closed."""
    for parameter in parameters:
        record = record_of(parameter)
        record.owner = record.engine = _nobody
        record.grad_reads, record.closed = DEFAULT_GRAD_READS, not whole
        if whole and type(parameter) is TrainedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def refuse_owned(module: nn.Module) -> None:
    """Raise ModelError for a parameter of another live engine, or one of which a closed engine has left a
    shard."""
    parameters = dict(module.named_parameters())
    if left := [name for name, parameter in parameters.items() if record_of(parameter).closed]:
        raise ModelError(
            f"{left[0]} was divided by an engine that is closed, so that its numbers are not whole here: "
            "build the model anew, and load what engine.save wrote. Without mesh.tp and mesh.pp, "
            "engine.close(gather=True) leaves it whole"
        )
    if any(engine_of(parameter) is not None for parameter in parameters.values()):
        gc.collect()  # frees an engine that only cycles keep alive
    for name, parameter in parameters.items():
        if engine_of(parameter) is not None:
            raise ModelError(
                f"{name} belongs to another engine, which holds its numbers: "
                "call engine.close(gather=True) of that one first (as where a notebook's cell runs again), "
                "give this one a model of its own (copy.deepcopy inside the "
                "other's full_parameters()), or train what both "
                "share in one engine, with the sum of the losses"
            )
