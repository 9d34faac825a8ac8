"""What a run says when it ends before its time: which checkpoint is the newest complete one, and how it goes
on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from test_job_resume import config as config_of
from test_job_resume import save

from polyreme.cli import endings
from polyreme.config import Config, Duration
from polyreme.distributed.environment import COMMAND
from polyreme.errors import ConfigError, DataError, ModelError, Problem
from polyreme.job.ended import checkpoint_entries
from polyreme.job.ending import last_words


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COMMAND, "polyreme train 'a b.toml' -n 2 --no-resume")
    return tmp_path / "run"


def written(run: Path, **section: Any) -> Config:
    return config_of(run, checkpoint=section)


def test_the_newest_complete_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(run)
    command = "\n  polyreme train 'a b.toml' -n 2 --no-resume"
    assert last_words(config) == f"there is no complete checkpoint yet; this begins anew:{command}"
    save(run / "step-3", 3, config)
    save(run / "step-9", 9, config)
    (run / "step-12.tmp").mkdir()
    assert (
        last_words(config)
        == f"the newest complete checkpoint is {run}/step-9; this goes on from it:{command}"
    )
    (run / "step-9" / "model.safetensors").unlink()
    assert f"checkpoint is {run}/step-3; this goes on" in last_words(config)
    monkeypatch.delenv(COMMAND)
    assert last_words(config).endswith("/step-3; the same command goes on from it")


def test_a_run_begun_anew_has_no_part_in_those_before_it(run: Path) -> None:
    config = written(run, resume="never")
    save(run / "step-9", 9, config)
    before = checkpoint_entries(run)
    assert last_words(config, before).startswith("there is no complete checkpoint yet; this begins anew:")
    save(run / "step-4", 4, config)
    assert last_words(config, before) == (
        f"the newest complete checkpoint is {run}/step-4; this goes on from it:\n"
        f"  polyreme train 'a b.toml' -n 2 --resume {run}/step-4"
    )


def test_a_checkpoint_of_the_name_of_an_earlier_one_is_the_new_runs(run: Path) -> None:
    config = written(run, resume="never")
    save(run / "step-4", 4, config)
    before = checkpoint_entries(run)
    shutil.rmtree(run / "step-4")
    save(run / "step-4", 4, config)
    assert f"checkpoint is {run}/step-4;" in last_words(config, before)


def test_a_run_from_elsewhere_goes_on_from_there_until_it_has_its_own(run: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other" / "step-7", 7, written(run))
    config = written(run, resume=str(other.parent))
    save(run / "step-9", 9, config)
    before = checkpoint_entries(run)
    assert f"checkpoint is {other};" in last_words(config, before)
    save(run / "step-8", 8, config, origin=str(other.parent))
    before = checkpoint_entries(run)
    assert f"checkpoint is {run}/step-8;" in last_words(config, before)


def test_the_end_of_a_run_has_nothing_to_go_on_with(run: Path) -> None:
    save(run / "step-3", 3, config := written(run))
    shorter = config.model_copy(
        update={"train": config.train.model_copy(update={"length": Duration(amount=3)})}
    )
    assert last_words(shorter) == f"{run}/step-3 is the end of this run"


def test_whatever_ends_it_says_so_but_what_never_began(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND)
    monkeypatch.setattr("sys.argv", ["/bin/polyreme", "train", "x.toml"])
    config = written(run)
    for error in (DataError("no"), ValueError("no"), KeyboardInterrupt()):
        begun = config_of(run / type(error).__name__, checkpoint={})
        with pytest.raises(type(error)) as caught, endings.explained(begun, speaks=True, knows=True):
            Path(begun.checkpoint.folder).mkdir(parents=True)
            log = Path(begun.checkpoint.folder, "log.jsonl")
            log.write_text('{"kind": "run"}\n{"kind": "step"}\n')
            raise error
        assert caught.value.__notes__ == [
            "there is no complete checkpoint yet; this begins anew:\n  polyreme train x.toml"
        ]
    (run / "log.jsonl").parent.mkdir(parents=True, exist_ok=True)
    (run / "log.jsonl").write_text('{"kind": "run"}\n{"kind": "step"}\n')  # of a run before
    with pytest.raises(ModelError) as early, endings.explained(config, speaks=True, knows=True):
        (run / "log.jsonl").write_text('{"kind": "run"}\n{"kind": "step"}\n{"kind": "run"}\n')
        raise ModelError("no")
    assert not hasattr(early.value, "__notes__")
    problem = ConfigError([Problem("batch.size", 0, "no", "1")])
    for ended in (problem, typer.Exit(3)):
        with pytest.raises(type(ended)) as silent, endings.explained(config, speaks=True, knows=True):
            raise ended
        assert not hasattr(silent.value, "__notes__")
    with pytest.raises(DataError) as of_rank, endings.explained(config, speaks=False, knows=False):
        raise DataError("no")
    assert not hasattr(of_rank.value, "__notes__")
