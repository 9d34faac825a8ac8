"""A dry run says what a real rank keeps in memory and sends: `bench/plan_memory.py` has more of it."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path

import pytest

import planned
from cover import ALL, cover
from planned import Case
from pool import Ranks


def has(case: Case) -> frozenset[Hashable]:
    """What the cases that are run have of each: every value, and each axis; with --all-cases every two
    values."""
    if ALL in os.environ:
        return planned.values(case, 2)
    values = {(name, value) for name, value in vars(case).items() if name != "mesh"}
    last = (each for each in case.mesh[-1:] if each[0] != "schedule")
    return frozenset({*values, *last, *(axis for axis, _ in case.mesh)})


CASES = cover(planned.cases(), has)
if ALL not in os.environ:
    divided = [case for case in CASES if "cp" in dict(case.mesh)]
    CASES = [*dict.fromkeys([*CASES[::3], *divided[-1:]])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_dry_run_says_what_ranks_have(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    for found in planned.compared(case, ranks, str(tmp_path)):
        assert not (found.states or found.traffic or found.tiers), found
        assert abs(found.peak) < 0.02
