"""Where a step is, which backward is its last, and what may come next.

Communication: none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from polyreme.errors import OrderError

Phase = Literal["idle", "accumulating", "ended", "reduced"]
"""idle: no backward has begun. accumulating: some have. ended: the last has, as far as that is known.
reduced: the totals over the ranks are taken, and the update may come."""
NEXT: Mapping[Phase, Collection[Phase]] = {
    "idle": ["accumulating", "ended", "reduced"],
    "accumulating": ["accumulating", "ended", "reduced"],
    "ended": ["reduced"],
    "reduced": [],
}
"""The legal moves of a step that is neither extended nor dropped."""
UNKNOWN = 1 << 60
"""Backwards of a step to come, where only their last is announced."""


@dataclass(frozen=True)
class Plan:
    """Which backward is the last of a step: by count, the `microbatches`th; or where the caller announces it,
    the coming one if it `is_last`."""

    microbatches: int
    is_last: bool | None = None
    extend: bool = False
    """Whether a backward after the last one is added."""
    own: float = 1.0
    """What a mean over ranks multiplies losses by whose backward the user begins."""

    @property
    def announced(self) -> bool:
        """Whether the caller says which one is the last."""
        return self.is_last is not None

    @property
    def to_come(self) -> int:
        """How many backwards come, the last included, as long as none has."""
        return self.microbatches if self.is_last is None else 1 if self.is_last else UNKNOWN

    def ends(self, microbatch: int) -> bool:
        """Whether the backward of this one, counted from 1, is the last."""
        return microbatch == self.microbatches if self.is_last is None else self.is_last


class Order:
    """What has been done of a step, by its `plan`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.phase: Phase = "idle"
        self.microbatches = 0
        """Those whose backward the user's loop has begun."""

    @property
    def is_over(self) -> bool:
        """Whether the last backward has begun."""
        return self.phase in ("ended", "reduced")

    def begin(self, last: bool = True) -> None:
        """A backward of the user's loop begins, the `last` one of a micro-batch."""
        self.move("ended" if last and self.plan.ends(self.microbatches + 1) else "accumulating")
        self.microbatches += last

    def move(self, to: Phase) -> None:
        """Raise OrderError where that is no legal move."""
        if to not in NEXT[self.phase]:
            raise OrderError(
                f"a step that is {self.phase} cannot be {to}: call zero_grad(), and begin it again"
            )
        self.phase = to

    def extend(self) -> None:
        """Let a step that has had its last backward have another one."""
        self.phase = "accumulating"
