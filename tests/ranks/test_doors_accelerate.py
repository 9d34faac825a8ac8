"""Accelerate scripts through the DeepSpeed door against the same scripts over DistributedDataParallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from door_scripts import both, same
from examples import ALL

pytestmark = pytest.mark.skipif(
    ALL not in os.environ, reason="its ranks import much anew, which takes long: run with --all-cases"
)

PLAIN = ("loop2", "dummies", "teacher", "two")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("accelerate")
    return both(folder, "hf_accelerate.py", PLAIN, ("loop2", "loop3", "dummies", "teacher", "two"))


@pytest.mark.parametrize("case", ["loop2", "loop3", "dummies", "teacher", "two"])
def test_same_numbers(facts: Any, case: str) -> None:
    plain, door = facts
    same(door[case], plain.get(case) or plain["loop2"])
