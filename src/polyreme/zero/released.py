"""Parameters whose memory comes and goes: what would read or write numbers that are not there raises
ModelError, and says where these can be had.

Invariant: the parameters of a bucket are `RELEASED` exactly while it is not whole, `GATHERED` while it is for
its block, `AfterForward` from there until it is released, and `WHOLE` otherwise. Of those that are gathered
only what methods give of their memory is followed. No communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from polyreme.errors import ModelError
from polyreme.models.tensor_access import touching, writes
from polyreme.zero.parameter import (
    FollowedParameter,
    State,
    WatchedParameter,
    Whole,
    caller,
    in_backward,
    name_of,
    state_of,
)


class ForATime(Whole):
    """The numbers are in memory that is freed behind the block."""

    kind = FollowedParameter

    def taken(self, parameter: Tensor, found: Any) -> Any:
        """What torch's own code takes, it lets go in time, and compiled code knows no `View`."""
        torchs = caller().f_globals.get("__name__", "").startswith("torch.")
        return found if torchs else followed(parameter, found)

    def refuse_writing(self, what: str, parameter: Tensor) -> NoReturn:
        raise ModelError(
            f"{what} writes to parameter {name_of(parameter)} inside "
            "a forward or backward (zero.stage = 3, or memory.params "
            "elsewhere), where it is a copy for a time: write to it "
            "between steps, inside `with engine.full_parameters(write=True):`"
        )


class AfterForward(ForATime):
    """The forward of the block is over. A use with a backward, which will read the memory, is told of, so
    that it stays."""

    kind = WatchedParameter

    def __init__(self, tell: Callable[[], Callable[[], object] | None]) -> None:
        """tell: a weak reference to what tells."""
        self._tell = tell

    def after(self, result: Any) -> None:
        leaves = pytree.tree_leaves(result)
        has_backward = any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves)
        if has_backward and not in_backward() and (tell := self._tell()) is not None:
            tell()


GATHERED = ForATime()


class View(Tensor):
    """What shares the memory of a parameter that is gathered: read while its block has it, refused
    afterwards. What an operator makes of it is plain. It may be of another tensor that is not to be written
    to, too, as its `state` says."""

    parameter: Tensor
    state: State

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        views = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, View)]
        copies = False
        if (name := touching(func)) is not None:
            for parameter in (view.parameter for view in views if not state_of(view.parameter).there):
                raise ModelError(
                    f"{name} of what was taken of parameter {name_of(parameter)} "
                    "in a forward or backward, where its memory is "
                    "freed behind the block (zero.stage = 3, or memory.params "
                    "elsewhere): take a copy there (.clone()), or read the "
                    "parameter inside `with engine.full_parameters():`"
                )
            sets = getattr(func, "__name__", "") == "__set__"
            if writes(name, *inputs, View) or (sets and isinstance(args[0], View)):
                views[0].state.refuse_writing(name, views[0].parameter)
            copies = sets or name in _LEAVES_TORCH
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = pytree.tree_map_only(
                View, lambda view: (view.clone() if copies else view).as_subclass(Tensor), inputs
            )
            result = func(*args, **kwargs)
            for view in views:
                state_of(view.parameter).after(result)
            for view in views:
                result = followed(view.parameter, result, view.state)
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if state_of(self.parameter).there:
            return repr(self.as_subclass(Tensor))
        return f"View({self.parameter!r})"


_LEAVES_TORCH = {"numpy", "__array__", "__dlpack__", "set_"}
"""Functions behind which nobody follows the memory: they get a copy."""


def view_of(parameter: Tensor, numbers: Tensor, state: State = GATHERED) -> View:
    """`numbers`, which are in the memory of a parameter."""
    view = numbers.as_subclass(View)
    view.parameter, view.state = parameter, state
    return view


def followed(parameter: Tensor, taken: Any, state: State = GATHERED) -> Any:
    """`taken`, in which each tensor that shares the parameter's memory is a `View`."""

    def follow(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or not torch._C._is_alias_of(tensor, parameter):  # type: ignore[attr-defined]
            return tensor
        return view_of(parameter, tensor, state)

    return pytree.tree_map_only(Tensor, follow, taken)


def refuse_loading(model: nn.Module) -> list[RemovableHandle]:
    """Have `load_state_dict` of the model, or of a part of it, raise ModelError where it reaches a released
    parameter. Left to torch, it becomes a RuntimeError."""
    return [module.register_load_state_dict_pre_hook(_before_loading) for module in model.modules()]


def _before_loading(module: nn.Module, *_: object) -> None:
    for parameter in module.parameters(recurse=False):
        state_of(parameter).refuse("load_state_dict", parameter)


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
