"""What a save and a run may not replace, and a folder that another run has: refused on every rank, and
nothing is lost."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import polyreme
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.run_directory import RUN_CLAIM
from polyreme.config import Config
from polyreme.engine import Engine
from polyreme.errors import CheckpointError, ConfigError
from polyreme.job import retention as saving
from polyreme.job.retention import Retention
from pool import Ranks


def refused(engine: Engine, path: Path, *said: str) -> None:
    for wait in (True, False):
        with pytest.raises(CheckpointError) as caught:
            engine.save(path, wait=wait)
            engine.wait()
        assert all(part in str(caught.value) for part in said), caught.value


def job(rank: int, world: int, folder: Path) -> None:
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        engine = polyreme.initialize(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
            {"batch": {"size": world}, "zero": {"stage": stage}},
            loss_fn=lambda output, batch: output.sum(),
        )
        refused(engine, folder / "docs", "docs would be replaced", "thesis.txt", "Save to another path")
        if world > 1:
            refused(
                engine,
                folder / f"mine-{rank}",
                "rank 1: it was to be ",
                "mine-1, and of rank 0 ",
                "give all ranks the same path",
            )
        path = folder / f"step-{stage}"
        for _ in range(2):
            engine.save(path)
            engine.train_step(torch.ones(1, 4))
        assert Directory(path).resume is not None
        refused(engine, folder, "it is a folder of checkpoints (step-0", "such as ")
    claims(rank, engine, folder / "run")


def claims(rank: int, engine: Engine, folder: Path) -> None:
    """A run's checkpoints begin where no other run lives, and are refused on every rank where one does."""
    config = Config.load({**engine.config.model_dump(), "checkpoint": {"folder": str(folder)}})
    retention = Retention(config, engine, None, lambda text: None)
    assert retention.begin().checkpoints == []
    other = None
    if rank == 0:
        assert json.loads((folder / RUN_CLAIM).read_text())["pid"]
    engine.save(folder / "best")  # it is this process' run
    retention.close()
    if rank == 0:
        assert not (folder / RUN_CLAIM).exists()
        other = (folder / RUN_CLAIM).open("w+")
        json.dump({"run": "other", "pid": 1, "host": "there", "since": "noon"}, other)
        other.flush()
        fcntl.flock(other, fcntl.LOCK_SH)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(saving, "PATIENCE", 0.0)
        with pytest.raises(
            CheckpointError,
            match=r"run is in use by another run, which process 1 on host there began noon: let it end",
        ):
            retention.begin()
    if other is not None:  # it dies, and its claim is taken over
        other.close()
    engine.mesh.gather_objects(None)
    retention.begin()
    retention.close()
    if rank == 0:
        (folder / "step-7").mkdir()
        (folder / "step-7" / "thesis.txt").write_text("four years")
    engine.mesh.gather_objects(None)
    with pytest.raises(ConfigError, match=r"step-7 in it would be replaced"):  # no rank waits for rank 0
        retention.begin()
    retention.close()


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_user_has_stays(tmp_path: Path, ranks: Ranks, world: int) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("four years")
    ranks(world, job, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs", "run", "step-0", "step-2", "step-3"]
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["best", "step-7"]
