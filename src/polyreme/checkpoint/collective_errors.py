"""Runs work on all ranks, so that a failure on one of them is an error on all. Communication: one gather of
the ranks' reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from polyreme.distributed.mesh import Axis
from polyreme.errors import CheckpointError


def reason(error: Exception) -> str:
    """The message of an error, with its type before it where it is not a CheckpointError."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def collectively(
    axis: Axis,
    work: Callable[[], Any],
    why: Callable[[int, Exception], str] = lambda rank, error: reason(error),
) -> list[Any]:
    """Run `work` on every rank. Returns the results of all ranks, which JSON must be able to hold. Raises
    CheckpointError on all ranks if it failed on one; `why` makes the message from that rank and its error."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = reason(error)
        with contextlib.suppress(Exception):
            failure = why(axis.rank, error)
    reports: list[Any] = axis.gather_objects({"result": result, "failure": failure})
    for report in reports:
        if report["failure"] is not None:
            raise CheckpointError(report["failure"])
    return [report["result"] for report in reports]
