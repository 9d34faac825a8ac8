"""Every error that Polyreme raises on purpose. Each says what was wrong, why, and what to change."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

WARNS: ContextVar[bool] = ContextVar("warns", default=True)
"""True if this rank gives the warnings that all ranks would give."""
VERIFY = "`polyreme verify CONFIG`, or polyreme.verify, proves that a plan trains the same as one device"
"""What stands behind advice on mesh.tp_plan."""
_BENEATH = {"polyreme", "torch", "contextlib"}
"""Packages whose lines a warning does not name."""
SHOWN = 200
"""Most characters of a value in a message."""


def shortened(write: Callable[[Any], str], value: object) -> str:
    """Return `value` as `write` formats it, in one line; the beginning of a long text, and the size of an
    integer too long to format."""
    try:
        text = write(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return (
            f"an integer of {value.bit_length():,} bits"
            if isinstance(value, int)
            else f"a {type(value).__name__} of very long integers"
        )
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def printable(text: str) -> str:
    """Return `text` with invisible characters, and those that would steer a terminal, escaped, except line
    breaks and tabs."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )


def warn(text: str, every: bool = False) -> None:
    """Warn at the line of the script that led here. By default one rank warns, of what all ranks find; with
    `every`, each rank that calls, of what only some find."""
    if not every and not WARNS.get():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BENEATH:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def named(names: Sequence[object], most: int = 5) -> str:
    """Return the first of several names as text, and how many more there are."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {named(ranks, 8)}"


class PolyremeError(Exception):
    """Base of all errors of this library. The command exits with `exit_status` when one ends it. Names in its
    text are `printable`."""

    exit_status = 1

    def __str__(self) -> str:
        return printable(super().__str__())


@dataclass(frozen=True)
class Problem:
    """One conflict found in a config: the key, its value, why it cannot be, and what to write instead."""

    key: str
    value: object
    reason: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{shortened(str, self.key)} = {shortened(repr, self.value)}: {self.reason}\n    fix: {self.fix}"
        )


class ConfigError(PolyremeError):
    """A config that cannot run. Lists every problem found, not only the first."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem], source: str | None = None) -> None:
        self.problems, self.source = list(problems), source
        where = f" in {source}" if source else ""
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(
            "\n".join([f"the config cannot run, {count}{where}:", *(f"  - {p}" for p in self.problems)])
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problems, self.source))


class DataError(PolyremeError):
    """Training data that is missing, empty, unreadable or too short."""


class BatchError(PolyremeError):
    """A batch or a loss of the wrong shape or kind."""


class OrderError(BatchError):
    """A call that does not come next in a step: one backward too many, an update too early."""


class ModelError(PolyremeError):
    """A model that cannot be trained as it is: no parameters, or parameters used in a way that cannot be
    followed."""


class NumericsError(PolyremeError):
    """NaN or Inf where training cannot go on; names the step, the rank and the first module that made it."""


class OutOfMemoryError(PolyremeError, RuntimeError):
    """Memory that ran out; says what asked for it, what the rank has, and what takes less. A RuntimeError, as
    torch's is."""


class CheckpointError(PolyremeError):
    """A checkpoint that cannot be written or read."""


class TierError(PolyremeError):
    """Host memory or files that hold states, parameters or activations: too little room, a folder in use, or
    a transfer that failed."""


class TransportError(PolyremeError):
    """A failure of the communication between ranks."""


class LaunchError(PolyremeError):
    """Ranks that could not be started, or that failed; names the first rank that failed."""
