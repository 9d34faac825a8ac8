"""What a rank tells of its step to whoever records it, such as the planner.

Invariant: without an observer nothing is told, and nothing costs time. No communication."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol


class Observer(Protocol):
    """Takes what a rank does, in its order."""

    def action(self, action: tuple[object, ...]) -> None:
        """Note that an action of the rank's row begins (`pipeline.schedule.Action`)."""

    def collective(self, axis: str, verb: str, nbytes: int, ranks: int) -> Callable[[], None]:
        """Note that a simulated rank begins a collective, or a message, over an axis of `ranks`. Returns what
        its waits call."""

    def update(self, elements: int, nbytes: int) -> None:
        """Note that a simulated rank updates so many numbers, by reading and writing so many bytes."""


OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)
