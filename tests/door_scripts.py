"""Runs a script of tests/doors on two ranks with a door and without one, and compares the facts that its
cases write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from command import polyreme

SCRIPTS = Path(__file__).parent / "doors"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "DS_ACCELERATOR": "cpu",
}


def run(folder: Path, script: str, cases: Iterable[str], *, door: bool) -> dict[str, Any]:
    """What each case wrote to FOLDER/CASE.json."""
    folder.mkdir()
    words = [
        "launch",
        *(["--deepspeed"] if door else []),
        "-n",
        "2",
        str(SCRIPTS / script),
        str(folder),
        *cases,
    ]
    status, output, errors = polyreme(folder, *words, variables=OFFLINE, door=door)
    assert status == 0, f"{output[-2000:]}\n{errors[-4000:]}"
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def both(folder: Path, script: str, plain: Sequence[str], door: Sequence[str]) -> Any:
    """The facts of cases without the door, and of cases with it."""
    return (run(folder / "plain", script, plain, door=False), run(folder / "door", script, door, door=True))


def numbers(value: Any) -> Iterator[float]:
    """All numbers in lists of lists."""
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    else:
        yield value


def same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Raise AssertionError where facts differ by more, relatively or absolutely."""
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert [*numbers(found[key])] == pytest.approx(
            [*numbers(wanted[key])], rel=tolerance, abs=tolerance
        ), key
        assert any(wanted.values())
