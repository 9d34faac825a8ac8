"""TRL's trainers through the DeepSpeed door against the same scripts over DistributedDataParallel."""

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

EVERY = ("sft2", "sft3", "lora3", "dpo2", "dpo3", "reward3")
CASES = EVERY if ALL in os.environ else ("sft3", "dpo2")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("trl")
    plain = ("sft2", "dpo2", *(case for case in ("lora3", "reward3") if case in CASES))
    return both(folder, "hf_trl.py", plain, CASES)


@pytest.mark.parametrize("case", CASES)
def test_same_numbers(facts: Any, case: str) -> None:
    plain, door = facts
    same(door[case], plain.get(case) or plain[f"{case[:-1]}2"])
