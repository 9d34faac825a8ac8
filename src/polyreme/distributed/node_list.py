"""Slurm's short forms of node names ("node[01-03,07],login"), and of how many tasks each node has
("2(x3),1").

Invariant: names come in the order in which Slurm counts the nodes."""

from __future__ import annotations

import re
from itertools import product

from polyreme.errors import LaunchError

LARGEST = 100_000
"""Most nodes of a list. A longer one is a mistake, and would take very long to write out."""

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(text: str) -> list[str]:
    """Return the names that a node list stands for. Numbers keep the digits that their first has: node[08-10]
    is node08, node09, node10. Raises LaunchError for any other text."""
    names: list[str] = []
    at = 0
    while found := _NAME.match(text, at):
        names += _expand(found[0], text)
        at = found.end() + 1
        if found.end() == len(text) and len(names) <= LARGEST:
            return names
        if text[found.end() : at] != ",":
            break
    raise _broken(text)


def _expand(name: str, text: str) -> list[str]:
    """Return the names of one item, which may have brackets in several places."""
    pieces = re.split(r"\[([^\]]*)\]", name)
    choices = [_numbers(piece, text) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
        if count > LARGEST:
            raise _broken(text)
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(brackets: str, text: str) -> list[str]:
    found = []
    for item in brackets.split(","):
        matched = _RANGE.fullmatch(item)
        if not matched:
            raise _broken(text)
        first, last = matched[1], matched[2] or matched[1]
        if not int(first) <= int(last) < int(first) + LARGEST:
            raise _broken(text)
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node. Raises LaunchError for any other text."""
    counts: list[int] = []
    for item in text.split(","):
        matched = _TASKS.fullmatch(item)
        if not matched or int(matched[2] or 1) > LARGEST:
            raise LaunchError(
                f"the tasks on each node are given as {text!r}, but must be such as 2(x3),1 "
                "(SLURM_STEP_TASKS_PER_NODE); start ranks by srun itself"
            )
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts


def _broken(text: str) -> LaunchError:
    return LaunchError(
        f"the node list is {text!r}, but must be names such as node[01-03,07],login (SLURM_STEP_NODELIST), "
        f"{LARGEST} at most; start ranks by srun itself, or set MASTER_ADDR and MASTER_PORT"
    )
