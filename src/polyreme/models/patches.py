"""Patches of a user's modules, which are undone when the engine is closed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Patches:
    """A list of changes of modules, each of which can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the forward of `module`."""
        self.attribute(module, "forward", forward)

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of `module` until `undo`, in front of the one that it or its class has."""
        own = [vars(module)[name]] if name in vars(module) else []
        setattr(module, name, value)
        self._undo.append(partial(_restore, module, name, value, own))

    def call(self, undo: Callable[[], object]) -> None:
        """Add a change of the caller's own: `undo` is called after later changes are undone, and before
        earlier ones are."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all changes, the last first. An attribute that others have replaced since then stays."""
        while self._undo:
            self._undo.pop()()


def _restore(module: nn.Module, name: str, ours: Any, own: list[Any]) -> None:
    if vars(module).get(name) is ours:
        delattr(module, name)
        for value in own:
            setattr(module, name, value)


class InPlace:
    """A forward in the place of a module's own. A copy of the module, such as a frozen reference, has its own
    forward again."""

    def __init__(self, own: Callable[..., Any], forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        self._own, self._forward = own, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> Any:
        return getattr, (getattr(self._own, "__self__", None), "forward")
