"""How long a step takes and what it keeps, from its table and the cost of each action. Pure arithmetic.

Invariant: the result follows from the table and the costs alone. A rank computes one action after another and
waits only for what the next one needs; messages pass meanwhile, each from when both of its ends are posted,
and do not slow each other down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from polyreme.errors import PolyremeError
from polyreme.pipeline.schedule import MESSAGES, Action, Op, Schedule, halves, other_end, peak_activations

RECEIVED: dict[Op, Op] = {"F": "RA", "B": "RG"}
"""The receive that an action waits for, where its row has it."""


@dataclass(frozen=True)
class Costs:
    """What actions cost, in any unit of time.

    duration: of one action of (op, stage), or of the very Action, which comes first; of those left out, none.
    transfer: of one message, from when both ends are posted.
    activations: bytes that a stage keeps of one micro-batch between forward and backward, one number for each
    stage."""

    duration: Mapping[tuple[Op, int] | Action, float]
    transfer: float = 0.0
    activations: Sequence[int] = ()

    def of(self, action: Action) -> float:
        """How long an action takes."""
        return self.duration.get(action, self.duration.get((action.op, action.stage), 0.0))

    @classmethod
    def even(cls, schedule: Schedule, transfer: float = 0.0) -> Costs:
        """Forward, backward for the inputs and backward for the weights take 1 each at every stage, a whole
        backward 2."""
        time: dict[Op, float] = {"F": 1.0, "B": 2.0, "W": 1.0}
        whole = {(a.op, a.stage): time[a.op] for row in schedule for a in row if a.op in time}
        return cls(whole | dict.fromkeys(halves(schedule), 1.0), transfer)


class Cell(NamedTuple):
    """An action in time; a send or receive from when its message begins to pass until it has arrived."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """cells: of each rank, in the order of its row. total: when the last action ends. bubble: of each rank,
    the fraction of `total` in which it computes nothing. peak: of each rank, micro-batches' activations kept
    at once, at most; peak_bytes: the same in bytes."""

    cells: tuple[tuple[Cell, ...], ...]
    total: float
    bubble: tuple[float, ...]
    peak: tuple[int, ...]
    peak_bytes: tuple[int, ...] | None

    @property
    def bubble_fraction(self) -> float:
        """The mean over all ranks."""
        return sum(self.bubble) / len(self.bubble)


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a table in simulated time. Raises PolyremeError for one that stops half-way (`schedule.check` says
    why)."""
    posted: dict[Action, float] = {}  # messages: when their rank came to them
    cells: list[list[Cell]] = [[] for _ in schedule]

    def passes(message: Action) -> tuple[float, float]:
        """The times from when to when a message is under way; without end if its other end is not posted
        yet."""
        start = max(posted[message], posted.get(other_end(message), inf))
        return start, start + costs.transfer

    moved = True
    while moved:
        moved = False
        for row, done in zip(schedule, cells, strict=True):
            for action in row[len(done) :]:
                start = done[-1].end if done else 0.0
                if action.op in MESSAGES:
                    posted[action] = start
                elif (receive := action._replace(op=RECEIVED.get(action.op, action.op))) in posted:
                    start = max(start, passes(receive)[1])
                if start == inf:
                    break
                done.append(Cell(action, start, start + costs.of(action)))
                moved = True
    if any(len(done) < len(row) for row, done in zip(schedule, cells, strict=True)):
        raise PolyremeError("the schedule stops half-way: check(schedule, microbatches) says where")
    total = max((done[-1].end for done in cells if done), default=0.0)
    return Simulation(
        cells=tuple(
            tuple(
                Cell(cell.action, *passes(cell.action)) if cell.action.op in MESSAGES else cell
                for cell in done
            )
            for done in cells
        ),
        total=total,
        bubble=tuple(
            1 - sum(cell.end - cell.start for cell in done) / total if total else 0.0 for done in cells
        ),
        peak=tuple(peak_activations(row) for row in schedule),
        peak_bytes=tuple(peak_activations(row, costs.activations) for row in schedule)
        if costs.activations
        else None,
    )
