"""What a verification found, in words, as a table, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

TITLES = {
    "data": "samples",
    "initial weights": "initial weights",
    "gathered weights": "weights in forwards",
    "input": "inputs of modules",
    "forward": "outputs of modules",
    "loss": "loss",
    "input gradient": "gradients of activations",
    "weight gradient": "gradients before reduction",
    "reduction": "gradients",
    "norm": "gradient norm",
    "update": "weights after the update",
    "buffer": "buffers",
    "random numbers": "random numbers",
}
"""What is compared in each direction, in the order in which a step makes it."""
BEYOND = 1e9
"""The largest error that is told apart: of what is not finite, or has another shape."""
WIDTH, ENDS = 80, 26
"""Columns of what is printed, and those that there are for a name."""
RESULTS = ("data", "initial weights", "loss", "reduction", "norm", "update", "buffer", "random numbers")
"""The directions by which a run is right or wrong."""
COUNTED = [TITLES[each] for each in ("loss", "norm", "reduction", "update")]
HOW = {
    "data": "the samples that it was given",
    "initial weights": "the weights that it begins with",
    "gathered weights": "the weights that it computes with",
    "input": "what it is given",
    "forward": "its forward",
    "loss": "the loss",
    "input gradient": "its backward (the gradient of what it is given)",
    "weight gradient": "its backward (the gradient of the weight, before any reduction)",
    "reduction": "the reduction of its gradient",
    "norm": "the norm of all gradients",
    "update": "its update",
    "buffer": "its value after the step",
    "random numbers": "the random numbers that it draws",
}
"""What a difference in each direction is of."""


@dataclass(frozen=True)
class Difference:
    """A tensor in which a run differs from the reference. step: from 1; 0 is before the first. direction: a
    key of `HOW`. name: of a module, parameter or buffer; "" for totals. micro: the micro-batch on that rank,
    from 0, or None. error, allowed: as shares of the norm. note: what it looks like. order: sorts what comes
    first."""

    step: int
    direction: str
    name: str
    rank: int
    micro: int | None
    error: float
    allowed: float
    note: str
    order: Sequence[float]

    def when(self) -> tuple[float, ...]:
        """Return when it comes, to be sorted by."""
        return self.step, *self.order

    def __str__(self) -> str:
        where = f"step {self.step}" if self.step else "the beginning"
        where += f", micro-batch {self.micro + 1} on rank {self.rank}" if self.micro is not None else ""
        what = f"{self.name}, {HOW[self.direction]}" if self.name else HOW[self.direction]
        size = f"off by {self.error:.2g} of its size, where rounding allows {self.allowed:.2g}"
        said = [size] * (self.error < BEYOND) + [self.note] * bool(self.note)
        return f"first in {where}, at {what}: {'; '.join(said) or 'not the same'}"


@dataclass
class Row:
    """What was compared of one kind: how many tensors, and the one with the largest error beside the allowed
    one."""

    what: str
    compared: int = 0
    error: float = 0.0
    allowed: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of `polyreme.verify`. layout: of the run. rows: what was compared. first: what differs
    first; None where the run computes what one device does. notes: what was assumed, and what was not
    compared."""

    mode: str
    steps: int
    layout: str
    rows: Sequence[Row]
    first: Difference | None
    notes: Sequence[str]

    @property
    def exit_status(self) -> int:
        """0 where the run is right, else 1."""
        return int(self.first is not None)

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if self.first is not None:
            return f"different: {self.first}"
        worst = max((row.error for row in self.rows if row.what in COUNTED), default=0.0)
        how = f"to {worst:.2g} (float64)" if self.mode == "structure" else "as closely as its dtype rounds"
        return (
            f"equal: {self.layout} compute{'s' * self.layout.startswith('1 rank ')} what one device "
            "computes: losses, norms, every gradient and every weight of "
            f"{self.steps} step{'s' * (self.steps > 1)} agree {how}"
        )

    def __str__(self) -> str:
        rows = [f"{'compared':26}{'tensors':>8}{'error':>9}{'allowed':>9}  the largest at"]
        for row in self.rows:
            end = row.name if len(row.name) <= ENDS else f"…{row.name[1 - ENDS :]}"
            numbers = f"{row.what:26}{row.compared:>8}{row.error:>9.1e}{row.allowed:>9.1e}"
            rows.append(f"{numbers}  {end if row.error else ''}".rstrip())
        notes = [textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join([self.line, "", *rows, *notes])

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {"verdict": self.line, "exit_status": self.exit_status, **asdict(self)}

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> Verdict:
        """Return the verdict that `to_dict` wrote."""
        rest = {key: found[key] for key in ("mode", "steps", "layout", "notes")}
        first = None if found["first"] is None else Difference(**found["first"])
        return cls(**rest, first=first, rows=[Row(**row) for row in found["rows"]])


def joined_rows(told: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Join what each rank compared, by direction."""
    found = []
    for direction in TITLES:
        if of := [Row(**each[direction]) for each in told if direction in each]:
            worst = max(of, key=lambda row: row.error / (row.allowed or 1))
            found.append(replace(worst, compared=sum(row.compared for row in of)))
    return found
