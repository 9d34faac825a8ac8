"""A run beside its plan, and a choice that a run goes on with."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from command import TINY, write_text
from examples import whole
from polyreme.checkpoint import manifest
from polyreme.config import Config
from polyreme.job import choice
from polyreme.job import run as train
from polyreme.job.comparison import said
from polyreme.job.resume import Beginning

PLANNED = {"parameters": 1000, "activations": 4000}


@pytest.mark.parametrize(
    ("memory", "seconds", "line"),
    [
        (PLANNED, 1.0, None),
        ({"parameters": 1000, "activations": 4490}, 1.09, None),
        ({}, 0.92, None),
        (PLANNED, 0.8, "not as planned: a step takes 0.8 s, 20% less than the plan's 1 s (plan.cluster may"),
        (PLANNED, 3.0, "not as planned: a step takes 3 s, 3 times the plan's 1 s"),
        (
            {"parameters": 1000, "activations": 4600, "temporary": 2},
            1.0,
            "not as planned: a rank has 5.5 KiB at the peak of a step, 12% more than the plan's 4.9 KiB "
            "(most of it activations: 4.5 KiB and 3.9 KiB)",
        ),
        ({"in all": 4000}, 1.0, "not as planned: a rank has 3.9 KiB at the peak of a step, 20% less than"),
    ],
)
def test_what_leaves_the_plan_is_told(memory: dict[str, int], seconds: float, line: str | None) -> None:
    found = said(PLANNED, 1.0, memory, seconds)
    assert (found is None) == (line is None) and (line is None or (found or "").startswith(line)), found


def config(**sections: Any) -> Config:
    tree = {"mesh": {"pp": "auto"}, "memory": {"activations": "auto"}, "batch": {"size": 8}}
    return Config.load({**tree, **sections})


@pytest.mark.parametrize(
    ("changes", "ranks", "stays"),
    [
        ({}, 2, True),
        ({"train": {"length": 7}, "optimizer": {"lr": 1e-3}}, 2, False),  # the optimizer's states are planned
        ({"train": {"length": 7}, "monitor": {"every": 3}, "lr_schedule": {"warmup": 2}}, 2, True),
        ({"batch": {"size": 16}}, 2, False),
        ({"mesh": {"pp": "auto", "tp": 2}}, 2, False),
        ({"data": {"sequence": 64}}, 2, False),
        ({"plan": {"cluster": "h100"}}, 2, False),
        ({}, 4, False),
    ],
)
def test_a_choice_stays_while_nothing_of_it_changes(
    changes: dict[str, Any], ranks: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"mesh.pp": 2, "memory.activations": "recompute", "batch.micro": 4}
    expected = {"plan.ranks": 2, "plan.seconds": 0.5, "plan.memory": {"states": 7}}
    before = config().chosen({**values, **expected}).resolve(2)
    manifest.write(tmp_path, manifest.Resume(config=before.model_dump(mode="json")))
    monkeypatch.setattr(choice, "find_beginning", lambda _: Beginning(checkpoints=[str(tmp_path)]))
    found = choice.kept(config(**changes), ranks)
    assert (found is not None) == stays
    if found is not None:
        assert {key: found[0][key] for key in (*values, *expected)} == {**values, **expected}
        assert config(**changes).chosen(found[0]).resolve(2).mesh.pp == 2
        assert "stays as in" in found[1] and 'mesh.pp = 2, memory.activations = "recompute"' in found[1]


def messages(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "message"]


@whole
def test_a_job_chooses_compares_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is as planned; its time on a busy machine is not, nor in a plan that says too little."""
    write_text(tmp_path)
    given = ["memory.activations=auto", "batch.micro=4", "monitor.console=false", "train.validate_every=none"]
    given += ["checkpoint.every='6 steps'", "data.validation=0"]
    (tmp_path / "run.toml").write_text(TINY)
    monkeypatch.setattr(train, "close", lambda: None)
    with contextlib.chdir(tmp_path):
        train.run(Config.load("run.toml", [*given, "train.length=8"]))
        first = messages(tmp_path)
        [line] = [each for each in first if each.startswith('"auto"')]
        assert line.startswith('"auto" (memory.activations) is chosen for ') and "next best" in line
        assert not [each for each in first if "at the peak of a step" in each]
        train.run(Config.load("run.toml", [*given, "train.length=9"]))
        second = messages(tmp_path)[len(first) :]
        assert [each for each in second if "stays as in run/step-8: memory.activations = " in each]
        wrong = ["plan.ranks=1", "plan.seconds=1e6", "plan.memory={states = 99}", "memory.activations=keep"]
        train.run(Config.load("run.toml", [*given, *wrong, "train.length=8", "checkpoint.folder=other"]))
    lines = [json.loads(line) for line in (tmp_path / "other" / "log.jsonl").read_text().splitlines()]
    [unlike] = [each["text"] for each in lines if "not as planned" in each.get("text", "")]
    assert "times the plan's 99 B (most of it " in unlike and "100% less than the plan's 1e+06 s" in unlike
