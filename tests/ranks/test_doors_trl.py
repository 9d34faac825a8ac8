"""TRL's trainers through the DeepSpeed door against the same scripts over DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from door_scripts import both, same

CASES = ("sft2", "sft3", "lora3", "dpo2", "dpo3", "reward3")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("trl")
    return both(folder, "hf_trl.py", ("sft2", "lora3", "dpo2", "reward3"), CASES)


@pytest.mark.parametrize("case", CASES)
def test_same_numbers(facts: Any, case: str) -> None:
    plain, door = facts
    same(door[case], plain.get(case) or plain[f"{case[:-1]}2"])
