"""Lightning's DeepSpeedStrategy through the DeepSpeed door, and Polyreme's own strategy, against the same
script over DistributedDataParallel."""

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


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("lightning")
    plain, door = both(folder, "lightning_module.py", ("ddp", "own0", "own3"), ("stage_2", "stage_3"))
    return {**plain, **door}


@pytest.mark.parametrize("case", ["own0", "own3", "stage_2", "stage_3"])
def test_same_numbers(facts: Any, case: str) -> None:
    same(facts[case], facts["ddp"])
