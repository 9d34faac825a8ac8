"""A training step as a table: one row of actions per pipeline rank. Pure data; `pipeline.run` executes a row.

Invariant: a row that `check` accepts runs every micro-batch forward once and then backward once, reduces after the last backward
and updates after the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from polyreme.errors import PolyremeError

Op = Literal["F", "B", "R", "U"]
"""F forward, B backward, R reduce (what of the gradients is not reduced yet), U update."""


class Action(NamedTuple):
    """One cell of the table; prints as "2F0": stage 2, forward, micro-batch 0."""

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]


def single_stage(microbatches: int) -> Schedule:
    """The table of one stage: gradient accumulation over `microbatches`, then reduce and update."""
    row = [Action(op, 0, i) for i in range(microbatches) for op in ("F", "B")]
    return ((*row, Action("R", 0), Action("U", 0)),)


def check(schedule: Schedule, microbatches: int) -> None:
    """Raise PolyremeError, naming the row and the action, unless every row is complete and in a possible order."""
    for rank, row in enumerate(schedule):
        done: set[Action] = set()
        for action in row:
            missing = [need for need in _needs(action, microbatches) if need not in done]
            if missing or action in done:
                why = f"needs {', '.join(map(str, missing))} first" if missing else "is done twice"
                raise PolyremeError(f"row {rank} of the schedule: {action} {why}")
            done.add(action)
        if not any(action.op == "U" for action in row):
            raise PolyremeError(f"row {rank} of the schedule never updates")


def _needs(action: Action, microbatches: int) -> Sequence[Action]:
    """What must come earlier in the same row."""
    if action.op == "B":
        return [Action("F", action.stage, action.microbatch)]
    if action.op == "R":
        return [Action("B", action.stage, i) for i in range(microbatches)]
    if action.op == "U":
        return [Action("R", action.stage)]
    return []
