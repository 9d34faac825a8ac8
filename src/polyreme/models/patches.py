"""Patches of a user's modules, which are undone when the engine is closed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Patches:
    """Changes modules, and undoes that."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Have `module` call `forward` in place of the one that it has."""
        self.attribute(module, "forward", forward)

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Give `module` an attribute of its own, in place of the one that it or its class has."""
        own = [vars(module)[name]] if name in vars(module) else []
        setattr(module, name, value)
        self._undo.append(partial(_restore, module, name, value, own))

    def call(self, undo: Callable[[], object]) -> None:
        """Have `undo` called where what was done before this stands, and what was done after it is undone."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Give every module the attributes that it had, the last change first; one that was replaced since by
        somebody else stays."""
        while self._undo:
            self._undo.pop()()


def _restore(module: nn.Module, name: str, ours: Any, own: list[Any]) -> None:
    if vars(module).get(name) is ours:
        delattr(module, name)
        for value in own:
            setattr(module, name, value)
