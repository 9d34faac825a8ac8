"""Parameters whose memory comes and goes: code that would read or write numbers that are not there raises
ModelError, which says where they can be had.

Invariant: a bucket's parameters are `RELEASED` exactly while the bucket is not whole, `GATHERED` while it is
whole for its block, `AfterForward` from the end of the block's forward until the release, and `IN_MEMORY`
otherwise. Of gathered parameters only tensors that share their memory are followed. No communication."""

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
    InMemory,
    ParameterState,
    WatchedParameter,
    caller,
    in_backward,
    name_of,
    state_of,
)


class ForATime(InMemory):
    """The numbers are in memory that is freed after the block."""

    kind = FollowedParameter

    def taken(self, parameter: Tensor, found: Any) -> Any:
        """Wrap the result of a script's call that shares the memory in a `ParameterView`. torch's own code
        drops its results in time, and compiled code knows no `ParameterView`."""
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
    """The forward of the block is over. A use that has a backward, which will read the memory, is reported,
    so that the memory stays."""

    kind = WatchedParameter

    def __init__(self, tell: Callable[[], Callable[[], object] | None]) -> None:
        """tell: a weak reference to the callback that reports it."""
        self._tell = tell

    def after(self, result: Any) -> None:
        leaves = pytree.tree_leaves(result)
        has_backward = any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves)
        if has_backward and not in_backward() and (tell := self._tell()) is not None:
            tell()


GATHERED = ForATime()


class ParameterView(Tensor):
    """A tensor that shares the memory of a gathered parameter: readable while its block has it, refused
    afterwards. Results of operators are plain tensors.

    By its `state` it may also guard another tensor that must not be written."""

    parameter: Tensor
    state: ParameterState

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        views = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, ParameterView)]
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
            if writes(name, *inputs, ParameterView) or (sets and isinstance(args[0], ParameterView)):
                views[0].state.refuse_writing(name, views[0].parameter)
            copies = sets or name in _LEAVES_TORCH
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = pytree.tree_map_only(
                ParameterView, lambda view: (view.clone() if copies else view).as_subclass(Tensor), inputs
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
"""Functions whose result nobody can follow: they get a copy."""


def view_of(parameter: Tensor, numbers: Tensor, state: ParameterState = GATHERED) -> ParameterView:
    """Return `numbers`, which lie in the memory of a parameter, as a `ParameterView`."""
    view = numbers.as_subclass(ParameterView)
    view.parameter, view.state = parameter, state
    return view


def followed(parameter: Tensor, taken: Any, state: ParameterState = GATHERED) -> Any:
    """Return `taken` with each tensor that shares the parameter's memory as a `ParameterView`."""

    def follow(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or not torch._C._is_alias_of(tensor, parameter):  # type: ignore[attr-defined]
            return tensor
        return view_of(parameter, tensor, state)

    return pytree.tree_map_only(Tensor, follow, taken)


def refuse_loading(model: nn.Module) -> list[RemovableHandle]:
    """Make `load_state_dict` of the model, or of a module in it, raise ModelError where it reaches a released
    parameter. torch would turn the error into a RuntimeError."""
    return [module.register_load_state_dict_pre_hook(_before_loading) for module in model.modules()]


def _before_loading(module: nn.Module, *_: object) -> None:
    for parameter in module.parameters(recurse=False):
        state_of(parameter).refuse("load_state_dict", parameter)


def refuse_transforms(what: str) -> None:
    """Raise ModelError inside a torch.func transform that differentiates, which would record the gather of
    `what`."""
    kinds = torch._C._functorch.TransformType
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() in (kinds.Grad, kinds.Jvp) for level in levels):
        raise ModelError(
            f"torch.func.grad, vjp or jvp runs a forward that gathers {what} (zero.stage = 3, or "
            "memory.params elsewhere): call it inside `with engine.full_parameters():`, which every rank "
            "must enter, or use loss.backward()"
        )
