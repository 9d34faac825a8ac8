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
        own = vars(module).get("forward")
        module.forward = forward
        self._undo.append(partial(_restore, module, forward, own))

    def undo(self) -> None:
        """Give every module the forward that it had, the last change first; one that was replaced since by
        somebody else stays."""
        while self._undo:
            self._undo.pop()()


def _restore(module: nn.Module, ours: Callable[..., Any], own: Callable[..., Any] | None) -> None:
    if vars(module).get("forward") is ours:
        del module.forward
        if own is not None:
            module.forward = own
