"""Parameters whose memory is released: what would read or write their numbers raises ModelError, and says
where these can be had.

Invariant: a parameter is a `Released` exactly while its bucket is not whole, a `Gathered` while it is for its
block, an `AfterForward` from there until it is released, and a `TrainedParameter` otherwise. Operators in a
block's forward cost nothing more: only what methods of a `Gathered` give of its memory is followed. No
communication."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from polyreme.errors import ModelError
from polyreme.models.tensor_access import read, touching, writes
from polyreme.zero.parameter import TrainedParameter, in_backward, name_of, record_of, recorded


class Released(TrainedParameter):
    """The class of a parameter while its memory is released."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, leaves = read(func, args, kwargs)
        for leaf in leaves:
            if isinstance(leaf, Released):
                refuse(str(name), leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def detach(self) -> Tensor:
        if record_of(self).listed and sys._getframe(1).f_code is nn.Module._save_to_state_dict.__code__:
            return self
        return super().detach()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Parameter containing: (released, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickling (torch.save, copy.copy)", self)

    def __dlpack__(self, **_: object) -> NoReturn:
        refuse("__dlpack__", self)


class Gathered(TrainedParameter):
    """The class of a parameter while its block has it whole, in memory that is freed behind the block."""

    @property
    def data(self) -> Tensor:
        return _followed(self, super().data, sys._getframe(1))

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_writing("data =", self)


class AfterForward(Gathered):
    """The class of a parameter that is whole still, behind the forward of its block. A use with a backward,
    which will read its memory, is told of, so that it stays."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        used = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, AfterForward)]
        _tell_of_uses(used, result)
        return result


class Pinnable(Protocol):
    """What gathers parameters."""

    def pin(self) -> None:
        """Have them stay."""


def _tell_of_uses(parameters: Iterable[Tensor], result: Any) -> None:
    """Tell of a use of parameters, some of which are `AfterForward`, if its result has a backward."""
    leaves = pytree.tree_leaves(result)
    if not any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves) or in_backward():
        return
    for parameter in parameters:
        if isinstance(parameter, AfterForward) and (unit := record_of(parameter).unit()) is not None:
            unit.pin()  # of the same unit others are `Gathered` then


def _follows(name: str) -> Callable[..., Any]:
    def method(self: Gathered, *args: Any, **kwargs: Any) -> Any:
        return _followed(self, getattr(TrainedParameter, name)(self, *args, **kwargs), sys._getframe(1))

    return method


def _follows_attribute(name: str) -> Callable[[Gathered], Any]:
    return lambda self: _followed(self, getattr(Tensor, name).__get__(self), sys._getframe(1))


_VIEWS = (
    *(
        "detach",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "t",
        "transpose",
        "permute",
        "movedim",
        "swapaxes",
    ),
    *(
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "__getitem__",
        "narrow",
        "select",
        "diagonal",
        "unfold",
        "as_strided",
    ),
    *("unbind", "chunk", "split", "tensor_split", "__iter__"),
)
"""Methods whose result may share the tensor's memory."""
for _name in _VIEWS:
    setattr(Gathered, _name, _follows(_name))
for _name in ("T", "mT", "H", "mH"):
    setattr(Gathered, _name, property(_follows_attribute(_name)))


class View(Tensor):
    """What shares the memory of a `Gathered`: read while its block has it, refused afterwards. What an
    operator makes of it is plain."""

    parameter: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        parameters = [leaf.parameter for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, View)]
        copies = False
        if (name := touching(func)) is not None:
            for parameter in (each for each in parameters if isinstance(each, Released)):
                raise ModelError(
                    f"{name} of what was taken of parameter {name_of(parameter)} "
                    "in a forward or backward, where its memory is "
                    "freed behind the block (zero.stage = 3, or memory.params "
                    "elsewhere): take a copy there (.clone()), or read the "
                    "parameter inside `with engine.full_parameters():`"
                )
            sets = getattr(func, "__name__", "") == "__set__"
            if writes(name, *inputs, View) or (sets and isinstance(args[0], View)):
                _refuse_writing(name, parameters[0])
            copies = sets or name in _LEAVES_TORCH
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = pytree.tree_map_only(
                View, lambda view: (view.clone() if copies else view).as_subclass(Tensor), inputs
            )
            result = func(*args, **kwargs)
            _tell_of_uses(parameters, result)
            for each in parameters:
                result = _followed(each, result)
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if isinstance(self.parameter, Released):
            return f"View({self.parameter!r})"
        return repr(self.as_subclass(Tensor))


_LEAVES_TORCH = {"numpy", "__array__", "__dlpack__", "set_"}
"""Functions behind which nobody follows the memory: they get a copy."""


def _followed(parameter: nn.Parameter, taken: Any, caller: FrameType | None = None) -> Any:
    """`taken`, in which each tensor that shares the parameter's memory is a `View`; what torch's own code
    takes, it lets go in time, and compiled code knows no such class."""
    if caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        return taken

    def follow(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or not torch._C._is_alias_of(tensor, parameter):  # type: ignore[attr-defined]
            return tensor
        view = tensor.as_subclass(View)
        view.parameter = parameter
        return view

    return pytree.tree_map_only(Tensor, follow, taken)


def _refuse_writing(name: str, parameter: nn.Parameter) -> NoReturn:
    raise ModelError(
        f"{name} writes to parameter {name_of(parameter)} inside "
        "a forward or backward (zero.stage = 3, or memory.params "
        "elsewhere), where it is a copy for a time: write to it "
        "between steps, inside `with engine.full_parameters(write=True):`"
    )


def refuse(what: str, parameter: nn.Parameter) -> NoReturn:
    """Raise ModelError: the numbers of a released parameter are asked for."""
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
        "engine.state_dict() gives whole copies of all, and engine.save writes them. A penalty over weights "
        "in a loss is optimizer.weight_decay, or is computed in the model's own forward"
    )


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse what needs their numbers from now on."""
    for parameter in parameters:
        parameter.__class__ = Released


def tell_of_uses(parameters: Iterable[nn.Parameter], unit: Pinnable) -> None:
    """Have `unit` be told of uses behind the forward of their block."""
    for record in recorded(parameters):
        record.unit = ref(unit)


def leave_block(parameters: Iterable[nn.Parameter]) -> None:
    """Note that the forward of their block has ended."""
    for parameter in parameters:
        parameter.__class__ = AfterForward


def unguard(parameters: Iterable[nn.Parameter], gathered: bool = False) -> None:
    """Allow it again: their numbers are there, or if `gathered` for a time."""
    for parameter in parameters:
        parameter.__class__ = Gathered if gathered else TrainedParameter


def list_in_state_dicts(parameters: Iterable[nn.Parameter]) -> None:
    """Have `state_dict()` of a module, and of each part of one, hold released parameters themselves, which
    raise ModelError where their numbers are used: scripts ask for one to know its names, too."""
    for record in recorded(parameters):
        record.listed = True


def refuse_loading(model: nn.Module) -> list[RemovableHandle]:
    """Have `load_state_dict` of the model, or of a part of it, raise ModelError where it reaches a released
    parameter. Left to torch, it becomes a RuntimeError."""
    return [module.register_load_state_dict_pre_hook(_before_loading) for module in model.modules()]


def _before_loading(module: nn.Module, *_: object) -> None:
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, Released):
            refuse("load_state_dict", parameter)


def refuse_transforms(what: str) -> None:
    """Raise ModelError inside a function transform that differentiates, which would follow the gather of
    `what`."""
    kinds = torch._C._functorch.TransformType
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() in (kinds.Grad, kinds.Jvp) for level in levels):
        raise ModelError(
            f"torch.func.grad, vjp or jvp runs a forward that gathers {what} (zero.stage = 3, or "
            "memory.params elsewhere): call it inside `with engine.full_parameters():`, which every rank "
            "must enter, or use loss.backward()"
        )
