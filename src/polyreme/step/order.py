"""The phase of a step, its last backward, and the calls that may come next.

Communication: none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from polyreme.errors import OrderError

Phase = Literal["idle", "accumulating", "ended", "reduced"]
"""idle: no backward has begun. accumulating: some have. ended: the last one has, as far as is known. reduced:
the totals over the ranks are taken, and the update may come."""
NEXT: Mapping[Phase, Collection[Phase]] = {
    "idle": ["accumulating", "ended", "reduced"],
    "accumulating": ["accumulating", "ended", "reduced"],
    "ended": ["reduced"],
    "reduced": [],
}
"""The legal moves of a step that is neither extended nor dropped."""
UNKNOWN = 1 << 60
"""A number of backwards for a step of which only the last is announced."""


@dataclass(frozen=True)
class Plan:
    """The rule by which a backward is the last of its step: the `microbatches`th; or, where the caller
    announces it, the coming one if `is_last`."""

    microbatches: int
    is_last: bool | None = None
    extend: bool = False
    """True if a backward after the last one is added."""
    own: float = 1.0
    """The factor that a mean over ranks puts on losses whose backward the user begins."""

    @property
    def announced(self) -> bool:
        """True if the caller announces the last backward."""
        return self.is_last is not None

    @property
    def to_come(self) -> int:
        """Backwards of a step that has had none."""
        return self.microbatches if self.is_last is None else 1 if self.is_last else UNKNOWN

    def ends(self, microbatch: int) -> bool:
        """Return whether the backward of this micro-batch, counted from 1, is the last."""
        return microbatch == self.microbatches if self.is_last is None else self.is_last


class Order:
    """The progress within a step, by its `plan`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.phase: Phase = "idle"
        self.microbatches = 0
        """Micro-batches whose backward the user's loop has begun."""

    @property
    def is_over(self) -> bool:
        """True if the last backward has begun."""
        return self.phase in ("ended", "reduced")

    def begin(self, last: bool = True) -> None:
        """Note that a backward of the user's loop begins, the `last` one of a micro-batch."""
        self.move("ended" if last and self.plan.ends(self.microbatches + 1) else "accumulating")
        self.microbatches += last

    def move(self, to: Phase) -> None:
        """Enter a phase. Raises OrderError where that is no legal move."""
        if to not in NEXT[self.phase]:
            raise OrderError(
                f"a step that is {self.phase} cannot be {to}: call zero_grad(), and begin it again"
            )
        self.phase = to

    def extend(self) -> None:
        """Allow another backward after the last one."""
        self.phase = "accumulating"
