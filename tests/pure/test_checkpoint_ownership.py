"""What a save, a run and its cleaning may replace or delete: a checkpoint of ours and nothing else, whatever
a user has at the path."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_run_directory import names, save, write
from torch import nn

import polyreme
from polyreme.checkpoint import ownership
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.run_directory import RUN_CLAIM, RunDirectory
from polyreme.engine import Engine
from polyreme.errors import CheckpointError
from polyreme.files import folder_lock


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    return polyreme.initialize(
        nn.Linear(2, 2), {"batch": {"size": 1}}, loss_fn=lambda output, batch: output.sum()
    )


def everything(folder: Path) -> dict[str, bytes | str | None]:
    """What is in the folder, byte for byte."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def documents(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("four years")
    return path


def a_file(path: Path) -> None:
    path.write_text("notes")


def with_notes(path: Path) -> None:
    (write(path, 1) / "evaluation").mkdir()
    (path / "evaluation" / "scores.txt").write_text("0.9")


def with_damaged_manifest(path: Path) -> None:
    (write(path, 1) / "resume.json").write_text("{}")


def hugging_face(path: Path) -> None:
    (write(path, 1) / "resume.json").unlink()


def a_link(path: Path) -> None:
    path.symlink_to(write(path.parent / "elsewhere", 1), target_is_directory=True)


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def run_folder(path: Path) -> None:
    write(path / "step-1", 1), write(path / "step-2", 2)


def linked_manifest(path: Path) -> None:
    documents(path)
    (path / "resume.json").symlink_to(write(path.parent / "elsewhere", 1) / "resume.json")


FOREIGN: dict[Callable[[Path], object], str] = {
    documents: "it has no resume.json of a checkpoint, but thesis.txt",
    a_file: "it is a file",
    with_notes: "evaluation/scores.txt, which the checkpoint in it does not name",
    with_damaged_manifest: "is damaged",
    hugging_face: "it has no resume.json of a checkpoint, but model.safetensors",
    a_link: "it is a symbolic link to ",
    a_dangling_link: "it is a symbolic link to ",
    run_folder: r"it is a folder of checkpoints \(step-1, step-2\)",
    linked_manifest: "it has no resume.json",
}


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
@pytest.mark.parametrize("suffix", ["", ".tmp", ".old"])
def test_a_save_replaces_nothing_else(
    tmp_path: Path, engine: Engine, make: Callable[[Path], object], suffix: str
) -> None:
    path = tmp_path / "docs"
    make(tmp_path / f"docs{suffix}")
    before = everything(tmp_path)
    for wait in (True, False):
        with pytest.raises(
            CheckpointError, match=f"docs{suffix} would be replaced.*{FOREIGN[make]}.*Save to another path"
        ):
            engine.save(path, wait=wait)
    assert everything(tmp_path) == before


def test_names_that_are_none(tmp_path: Path, engine: Engine) -> None:
    documents(tmp_path / "docs")
    before = everything(tmp_path)
    with contextlib.chdir(tmp_path / "docs"):
        for path in (".", "", "..", "/", "../docs/.."):
            with pytest.raises(CheckpointError, match="not a name for a checkpoint: give one in it, such as"):
                engine.save(path)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("suffix", ["", ".tmp", ".old"])
def test_what_is_ours_or_empty_is_replaced(tmp_path: Path, engine: Engine, suffix: str) -> None:
    path = tmp_path / "step"
    for make in (lambda there: there.mkdir(), lambda there: write(there, 1), engine.save, unfinished):
        make(tmp_path / f"step{suffix}")
        engine.save(path)
        assert Directory(path).resume is not None and [each.name for each in tmp_path.iterdir()] == ["step"]
        assert ownership.UNFINISHED not in {each.name for each in path.iterdir()}
        shutil.rmtree(path)


def unfinished(path: Path) -> None:
    """What a killed process leaves."""
    path.mkdir()
    (path / ownership.UNFINISHED).write_text("{}")
    (path / "model.safetensors").write_bytes(b"half")


def test_a_checkpoint_that_another_process_writes(tmp_path: Path, engine: Engine) -> None:
    unfinished(tmp_path / "step.tmp")
    told = {"run": "other", "pid": 1, "host": "there", "since": "noon"}
    (tmp_path / "step.tmp" / ownership.UNFINISHED).write_text(json.dumps(told))
    before = everything(tmp_path)
    with (tmp_path / "step.tmp" / ownership.UNFINISHED).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(
            CheckpointError, match=r"in use by another run, which process 1 on host there began noon"
        ):
            engine.save(tmp_path / "step")
        assert everything(tmp_path) == before
        RunDirectory(tmp_path).tidy()
    assert everything(tmp_path) == before
    engine.save(tmp_path / "step")
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


def test_a_folder_that_a_run_has(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / RUN_CLAIM).write_text(
        json.dumps({"run": "other", "pid": 1, "host": "there", "since": "noon"})
    )
    with (tmp_path / RUN_CLAIM).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(
            CheckpointError, match="is the folder of a run, process 1 on host there: let it end"
        ):
            engine.save(tmp_path / "step-1")
    engine.save(tmp_path / "step-1")


def test_a_run_deletes_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    documents(tmp_path / "step-7"), documents(tmp_path / "step-8.tmp"), documents(tmp_path / "step-9.old")
    documents(tmp_path / "step-3.earlier"), documents(tmp_path / "step-6.damaged")
    (tmp_path / "step-4").symlink_to(documents(tmp_path / "mine"), target_is_directory=True)
    before = everything(tmp_path)
    run.tidy()
    assert [path.name for path in run.foreign()] == ["step-4", "step-7", "step-8.tmp", "step-9.old"]
    assert [path.name for path in run.foreign(after=7)] == ["step-8.tmp", "step-9.old"]
    for step in (5, 6, 8):
        save(run, step) if step != 8 else write(tmp_path / "step-8", 8)
    with_notes(tmp_path / "step-2")
    with pytest.raises(CheckpointError, match=r"step-6\.damaged was not deleted"):
        run.pass_over(tmp_path / "step-6")
    assert [path.name for path in run.set_aside(after=5)] == ["step-6", "step-8"]
    with pytest.raises(CheckpointError, match=r"so these stay: \S*step-3\.earlier: it has no resume.json"):
        run.drop_earlier()
    save(run, 10)
    with pytest.raises(
        CheckpointError,
        match=r"so these stay: \S*step-2: it has evaluation, evaluation/scores.txt.*step-4: .*step-7: ",
    ):
        run.prune(1)
    left = everything(tmp_path)
    assert before.items() <= left.items() and "step-2/evaluation/scores.txt" in left
    assert {"step-5", "step-6", "step-8", "step-6.earlier", "step-8.earlier"}.isdisjoint(
        names(run)
    ) and "step-10" in names(run)


def test_what_is_left_of_a_deleted_one_is_ours_at_any_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ready in (write, lambda path, _: unfinished(path)):
        for after in range(5):
            ready(tmp_path / "step", 1)
            left = after

            def counted(change: Callable[..., None]) -> Callable[..., None]:
                def call(*args: object, **options: object) -> None:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise KeyboardInterrupt
                    change(*args, **options)

                return call

            with monkeypatch.context() as patches:
                for name in ("unlink", "rmdir"):
                    patches.setattr(os, name, counted(getattr(os, name)))
                with contextlib.suppress(KeyboardInterrupt):
                    ownership.remove(tmp_path / "step")
            assert ownership.why_not(tmp_path / "step") is None
            ownership.remove(tmp_path / "step")
            assert not (tmp_path / "step").exists()


@pytest.mark.parametrize(
    ("mount", "taken"),
    [
        ("ext4 /dev/sda rw", True),
        ("nfs4 server:/ rw,vers=4.2,local_lock=none", True),
        ("nfs server:/ rw,local_lock=all", False),
        ("fuse.sshfs there: rw", False),
        ("lustre mds:/ rw,localflock", False),
    ],
)
def test_a_dead_claim_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, taken: bool
) -> None:
    device = tmp_path.stat().st_dev
    (tmp_path / "mounts").write_text(
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw shared:1 - {mount}\n"
    )
    monkeypatch.setattr(folder_lock, "MOUNTS", tmp_path / "mounts")
    dead = {"run": "other", "pid": 1, "host": "there", "boot": "b", "since": "noon"}
    for alike in ({"host": folder_lock.socket.gethostname()}, {"boot": folder_lock.boot()}, {}):
        (tmp_path / folder_lock.NAME).write_text(json.dumps(dead | alike))
        if alike or taken:
            folder_lock.Claim(tmp_path, "mine").close()
            assert not (tmp_path / folder_lock.NAME).exists()
        else:
            with pytest.raises(
                polyreme.PolyremeError,
                match=rf"process 1 on host there \(noon\).*delete {tmp_path / folder_lock.NAME}",
            ):
                folder_lock.Claim(tmp_path, "mine")
            assert json.loads((tmp_path / folder_lock.NAME).read_text()) == dead


def test_a_claim_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("four years")
    (tmp_path / "run" / folder_lock.NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(polyreme.PolyremeError, match=r"polyreme.files.folder_lock in it is a symbolic link"):
        folder_lock.Claim(tmp_path / "run", "run")
    assert (tmp_path / "mine").read_text() == "four years"
