"""Computes how long a step takes, and how many activations it keeps, from its table and the cost of each
action. Pure arithmetic.

Invariant: the result depends only on the table and the costs. A rank computes one action after another, and
waits only for the messages that the next one needs; messages pass meanwhile, each from when both of its ends
are posted, and do not slow each other down."""

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
    """The costs of actions, in any unit of time.

    duration: of each action of (op, stage), or of one Action, which has precedence; 0 for those left out.
    transfer: of one message, from when both ends are posted.
    activations: bytes that each stage keeps of one micro-batch between forward and backward."""

    duration: Mapping[tuple[Op, int] | Action, float]
    transfer: float = 0.0
    activations: Sequence[int] = ()

    def of(self, action: Action) -> float:
        """The duration of an action."""
        return self.duration.get(action, self.duration.get((action.op, action.stage), 0.0))

    def end(self, action: Action, start: float) -> float:
        """The time at which an action that begins at `start` ends. Called once for each action, in the order
        of its row."""
        return start + self.of(action)

    @classmethod
    def even(cls, schedule: Schedule, transfer: float = 0.0) -> Costs:
        """Costs of 1 at every stage for a forward, and for each half of a backward; 2 for a whole
        backward."""
        time: dict[Op, float] = {"F": 1.0, "B": 2.0, "W": 1.0}
        whole = {(a.op, a.stage): time[a.op] for row in schedule for a in row if a.op in time}
        return cls(whole | dict.fromkeys(halves(schedule), 1.0), transfer)


class Cell(NamedTuple):
    """An action with its start and end; for a send or receive, of its message's transfer."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A step in simulated time. total: when the last action ends. For each rank, cells: in the order of its
    row; bubble: the fraction of `total` in which it computes nothing; peak: the most micro-batches whose
    activations it keeps at once; peak_bytes: the same in bytes, None without `Costs.activations`."""

    cells: tuple[tuple[Cell, ...], ...]
    total: float
    bubble: tuple[float, ...]
    peak: tuple[int, ...]
    peak_bytes: tuple[int, ...] | None

    @property
    def bubble_fraction(self) -> float:
        """The mean bubble of all ranks."""
        return sum(self.bubble) / len(self.bubble)


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a table in simulated time. Raises PolyremeError for one that deadlocks (`schedule.check` says
    why)."""
    posted: dict[Action, float] = {}  # the time at which each message's rank came to it
    cells: list[list[Cell]] = [[] for _ in schedule]

    def passes(message: Action) -> tuple[float, float]:
        """The start and end of a message's transfer; infinite if its other end is not posted yet."""
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
                done.append(Cell(action, start, costs.end(action, start)))
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
