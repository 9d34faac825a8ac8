"""Parameters whose memory is released: what would read or write their numbers raises ModelError, and says where these can be had.

Invariant: a parameter is a `Released` exactly while its bucket is not whole, and a `TrainedParameter` otherwise, so that what computes
with whole parameters costs nothing more. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.touching import touching
from polyreme.zero.parameter import NAMES, TrainedParameter


class Released(TrainedParameter):
    """The class of a parameter while its memory is released."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := touching(func)) is not None:
            refuse(name, next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Released)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing: (released, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickling (torch.save, copy.copy)", self)

    def __dlpack__(self, **_: object) -> NoReturn:
        refuse("__dlpack__", self)


def refuse(what: str, parameter: nn.Parameter) -> NoReturn:
    """Raise ModelError: the numbers of a released parameter are asked for."""
    raise ModelError(
        f"{what} of parameter {NAMES.get(parameter, '?')}, whose numbers are not in memory between its uses (zero.stage = 3, or "
        "memory.params elsewhere): do it inside `with engine.full_parameters():` (with write=True to change it), which every rank must "
        "enter; engine.state_dict() gives whole copies of all, and engine.save writes them"
    )


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """From now on refuse what needs their numbers."""
    for parameter in parameters:
        parameter.__class__ = Released


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    """Their numbers are there again."""
    for parameter in parameters:
        parameter.__class__ = TrainedParameter


def refuse_loading(model: nn.Module) -> None:
    """Have `load_state_dict` of the model, or of a part of it, raise ModelError where it reaches a released parameter. Left to torch, it
    becomes a RuntimeError."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_before_loading)


def _before_loading(module: nn.Module, *_: object) -> None:
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, Released):
            refuse("load_state_dict", parameter)
