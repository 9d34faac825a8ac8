"""Unmodified Trainer scripts through the DeepSpeed door, beside Trainer itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from command import polyreme
from door_scripts import OFFLINE
from examples import ALL

SCRIPT = Path(__file__).parents[1] / "doors" / "hf_trainer.py"
FEW = ("zero3", "zero3-resumed", "offload", "lora")
EVERY = (*FEW, "ds-optimizer", "generate", "zero1", "zero2", "best", "weights-alone", "compiled")
EXACT = EVERY if ALL in os.environ else FEW
"""Cases in which Trainer alone does the same."""
AS_ZERO3 = ("zero1", "offload", "ds-optimizer")
"""Cases that differ in the config of DeepSpeed alone."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What all cases left, with Trainer alone (over DistributedDataParallel) and through the door."""
    folder = tmp_path_factory.mktemp("trainer")
    found = folder / "alone", folder / "door"
    alone = [case for case in EXACT if case not in AS_ZERO3]
    for each, words, cases in zip(
        found, ((), ("--deepspeed",)), (alone, [*EXACT, "ds-scheduler"]), strict=True
    ):
        command = ["launch", "-n", "2", *words, str(SCRIPT), str(each), *cases, "bf16"]
        status, output, errors = polyreme(folder, *command, variables=OFFLINE, door=bool(words))
        assert status == 0, f"{output[-2000:]}\n{errors[-4000:]}"
    return found


def history(folder: Path, case: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / case / "history.json").read_text())
    return found


@pytest.mark.parametrize("case", [*EXACT, "bf16"])
def test_losses_are_those_of_trainer_alone(folders: tuple[Path, Path], case: str) -> None:
    alone = history(folders[0], "zero3" if case in AS_ZERO3 else case)
    door = history(folders[1], case)
    assert len(alone) == len(door) > 8
    tolerance = {"loss": 1e-6, "eval_loss": 1e-6, "train_loss": 1e-6, "grad_norm": 1e-5}
    if case == "bf16":  # Trainer alone computes under autocast, with weights in fp32
        tolerance = dict.fromkeys(tolerance, 1e-2)
    for one, other in zip(alone, door, strict=True):
        assert one.keys() == other.keys() and one.get("eval_tokens") == other.get("eval_tokens")
        for key in one.keys() & tolerance.keys():
            assert other[key] == pytest.approx(one[key], rel=tolerance[key]), (key, one["step"])


def test_a_resumed_run_is_the_run_itself(folders: tuple[Path, Path]) -> None:
    losses = [
        [each["loss"] for each in history(folders[1], case) if "loss" in each]
        for case in ("zero3", "zero3-resumed")
    ]
    assert losses[0] == losses[1]  # to the last bit; the history of the resumed run begins with the other's


def test_what_a_checkpoint_has(folders: tuple[Path, Path]) -> None:
    checkpoints = sorted(path.name for path in (folders[1] / "zero3").glob("checkpoint-*"))
    assert len(checkpoints) == 2  # save_total_limit
    newest = folders[1] / "zero3" / checkpoints[-1]
    there = {path.name for path in newest.iterdir()}
    assert {"model.safetensors", "latest", "zero_to_fp32.py", "trainer_state.json"} <= there
    tag = (newest / "latest").read_text()
    assert (newest / tag / "resume.json").is_file()
    assert (folders[1] / "lora" / "checkpoint-8" / "adapter_model.safetensors").is_file()


def test_the_schedule_of_the_config_is_followed(folders: tuple[Path, Path]) -> None:
    rates = [each["learning_rate"] for each in history(folders[1], "ds-scheduler") if "learning_rate" in each]
    assert rates[0] < rates[1] and rates[2:] == sorted(rates[2:], reverse=True)
