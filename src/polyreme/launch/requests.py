"""What a cluster is asked for, and the error that names all that it cannot be asked for.

Communication: none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from polyreme.errors import LaunchError, Problem

STOPPED = 75
"""The exit status of a run that was asked to save and end, and is to go on (EX_TEMPFAIL)."""
ENDS = "\0polyreme: this rank ends with status {} {}\0\n"
"""What a rank that ends writes to stderr for `command`, which does not show it: its status, and what it
said of its failure, as JSON. A whole line, as Open MPI may keep what is none back till its own end."""
UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}


class RequestError(LaunchError):
    """Options that a cluster cannot fulfil; lists all of them."""

    exit_status = 2

    def __init__(self, where: str, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join([f"{where} cannot run this:", *(f"  - {each}" for each in self.problems)]))


def size(text: str) -> float | None:
    """Bytes (or units) of a Kubernetes quantity such as 16Gi; None of what is none."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if found is None or found[2] not in UNITS:
        return None
    return float(found[1]) * UNITS[found[2]]


def size_problems(**given: str | None) -> Iterable[Problem]:
    """Sizes that are none, by the names of their options."""
    for option, text in given.items():
        if text is not None and not size(text):
            reason = "it is no size above 0"
            yield Problem(f"--{option}", text, reason, "write a number and M, G, T, Mi, Gi or Ti, as in 16Gi")


def count_problems(counts: Mapping[str, tuple[int | None, int]]) -> Iterator[Problem]:
    """Counts, by the names of their options, that are below the least of them."""
    for option, (count, least) in counts.items():
        if count is not None and count < least:
            yield Problem(option, count, f"it is below {least}", f"give {least} or more")


def gpu_problems(ranks: int, gpus: int | None, of: str) -> Iterator[Problem]:
    """More ranks than the GPUs of each `of`, a pod or a node."""
    if gpus is not None and ranks > gpus:
        reason = f"each {of} has {gpus} (--gpus), and a GPU takes one rank"
        yield Problem("-n", ranks, reason, f"give -n {gpus}, or more GPUs")
