"""Requests to a cluster, and the error that lists all that it cannot fulfil.

Communication: none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from polyreme.errors import LaunchError, Problem

STOPPED = 75
"""The exit status of a run that was asked to save and end, and is to go on (EX_TEMPFAIL)."""
ENDS = "\0polyreme: this rank ends with status {} {}\0\n"
"""The report that a rank which ends writes to stderr for `command`, which does not show it: its exit status,
and the text of its failure as JSON. It is a whole line, as Open MPI may hold partial lines back till its own
end."""
UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("", "k", "M", "G", "T", "P"))},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}


class RequestError(LaunchError):
    """Options that a cluster cannot fulfil, with all problems."""

    exit_status = 2

    def __init__(self, where: str, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join([f"{where} cannot run this:", *(f"  - {each}" for each in self.problems)]))


def size(text: str) -> float | None:
    """Return the bytes (or units) of a Kubernetes quantity such as 16Gi; None for any other text."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if found is None or found[2] not in UNITS:
        return None
    return float(found[1]) * UNITS[found[2]]


def size_problems(**given: str | None) -> Iterable[Problem]:
    """Yield values that are no size, by the names of their options."""
    for option, text in given.items():
        if text is not None and not size(text):
            reason = "it is no size above 0"
            yield Problem(f"--{option}", text, reason, "write a number and M, G, T, Mi, Gi or Ti, as in 16Gi")


def count_problems(counts: Mapping[str, tuple[int | None, int]]) -> Iterator[Problem]:
    """Yield counts that are below their minimum, by the names of their options."""
    for option, (count, least) in counts.items():
        if count is not None and count < least:
            yield Problem(option, count, f"it is below {least}", f"give {least} or more")


def gpu_problems(ranks: int, gpus: int | None, of: str) -> Iterator[Problem]:
    """Yield a problem where there are more ranks than GPUs of each `of`, a pod or a node."""
    if gpus is not None and ranks > gpus:
        reason = f"each {of} has {gpus} (--gpus), and a GPU takes one rank"
        yield Problem("-n", ranks, reason, f"give -n {gpus}, or more GPUs")
