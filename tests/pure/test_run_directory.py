"""The folder of a run: what is kept of its checkpoints, whatever instant a process was killed at."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors

from examples import examples
from polyreme.checkpoint import manifest
from polyreme.checkpoint.manifest import File, Resume
from polyreme.checkpoint.run_directory import BEST, LINK, RunDirectory, is_whole, progress_of, step_of
from polyreme.config import Duration, Progress
from polyreme.errors import CheckpointError


class Killed(BaseException):
    """The end of a process in the middle of what it does."""


def write(path: Path, step: int) -> Path:
    """A checkpoint of 8 samples and 100 tokens a step."""
    path.mkdir(parents=True)
    weights = save_tensors({"weight": torch.full((4,), float(step))})
    (path / "model.safetensors").write_bytes(weights)
    state = {"step": step, "samples": 8 * step, "tokens": 100 * step}
    manifest.write(path, Resume(files={"model.safetensors": File(len(weights), crc32(weights))}, state=state))
    return path


def save(run: RunDirectory, step: int) -> Path:
    """Beside its place, then renamed, as the engine does."""
    write(run.path / f"step-{step}.tmp", step)
    return (run.path / f"step-{step}.tmp").rename(run.path / f"step-{step}")


def steps(run: RunDirectory) -> list[int]:
    return [step_of(path) for path in run.saved()]


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.path.iterdir())


@contextmanager
def killed_at(change: int) -> Iterator[None]:
    """The process ends right before change number `change` to the folder, from 0; in the middle of it where
    it deletes a folder."""
    left = change

    def count(half: Path | None = None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            if half is not None:
                next(iter(half.iterdir())).unlink(missing_ok=True)
            raise Killed

    rename, replace, rmtree = Path.rename, Path.replace, shutil.rmtree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, target: (count(), rename(path, target))[1])
        patch.setattr(Path, "replace", lambda path, target: (count(), replace(path, target))[1])

        def remove(path: Path, ignore_errors: bool = False) -> None:
            if path.exists():
                count(path)
            rmtree(path, ignore_errors)

        patch.setattr(shutil, "rmtree", remove)
        yield


def test_nothing_yet(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "none")
    run.tidy()
    run.prune(1)
    run.drop_earlier()
    assert (run.saved(), run.newest(), run.set_aside()) == ([], None, [])


def test_only_whole_directories_of_that_name_count(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in (
        "step-9",
        "step-10",
        "step-2",
        "step-11.tmp",
        "step-12.old",
        "step-13.damaged",
        "step-x",
        "step-",
        "step--3",
        "other",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-20").write_text("a file")
    assert steps(run) == [2, 9, 10] and run.newest() == tmp_path / "step-10"
    run.tidy()
    assert names(run) == sorted(
        ["step-9", "step-10", "step-2", "step-13.damaged", "step-x", "step-", "step--3", "other", "step-20"]
    )


def test_latest_is_a_whole_name_and_may_be_wrong(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.point(save(run, 3))
    assert (tmp_path / "latest").read_text() == "step-3\n"
    newer = save(run, 5)
    with pytest.raises(Killed), killed_at(0):
        run.point(newer)
    assert (tmp_path / "latest").read_text() == "step-3\n" and run.newest() == newer
    (tmp_path / "latest").write_text("step-77")
    assert run.newest() == newer
    run.tidy()
    assert names(run) == ["latest", LINK, "step-3", "step-5"]


def test_the_link_leads_to_the_newest_at_any_instant(tmp_path: Path) -> None:
    run, link = RunDirectory(tmp_path), tmp_path / LINK
    run.point(save(run, 3))
    assert link.readlink() == Path("step-3") and (link / "model.safetensors").is_file()
    newer = save(run, 5)
    with pytest.raises(Killed), killed_at(1):  # between `latest` and the link
        run.point(newer)
    assert (tmp_path / "latest").read_text() == "step-5\n" and link.readlink() == Path("step-3")
    run.tidy()
    assert names(run) == ["latest", LINK, "step-3", "step-5"]
    run.point(tmp_path / "step-5")
    assert link.readlink() == Path("step-5") and steps(run) == [3, 5]


def test_the_link_to_the_best_leads_to_what_is_there(tmp_path: Path) -> None:
    run, link = RunDirectory(tmp_path), tmp_path / BEST
    for step in (3, 5):
        save(run, step)
        run.point_to_best(step)
        assert link.readlink() == Path(f"step-{step}") and is_whole(link)
    with pytest.raises(Killed), killed_at(0):
        run.point_to_best(3)
    assert link.readlink() == Path("step-5")
    run.tidy()
    assert names(run) == [BEST, "step-3", "step-5"]
    run.point_to_best(7)
    assert not os.path.lexists(link)
    link.mkdir()
    run.point_to_best(None)
    with pytest.raises(CheckpointError, match=f"{BEST} is there, and is no link to a checkpoint"):
        run.point_to_best(5)
    assert link.is_dir() and steps(run) == [3, 5]


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_bears_the_name_of_the_link_and_is_none_of_ours_stays(tmp_path: Path, what: str) -> None:
    run, link, mine = RunDirectory(tmp_path / "run"), tmp_path / "run" / LINK, tmp_path / "mine"
    newest = save(run, 3)
    mine.mkdir()
    if what == "file":
        link.write_text("mine")
    elif what == "folder":
        link.mkdir()
    else:
        link.symlink_to(mine)
    before = link.lstat()
    with pytest.raises(CheckpointError, match=f"{LINK} is there, and is no link to a checkpoint"):
        run.point(newest)
    assert link.lstat() == before and not list(mine.iterdir())
    assert (tmp_path / "run" / "latest").read_text() == "step-3\n"


def test_where_there_are_no_links_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    run = RunDirectory(tmp_path)
    run.point(save(run, 3))
    assert names(run) == ["latest", "step-3"]


def test_what_is_kept(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in range(100, 1300, 100):
        save(run, step)
        run.prune(2, Duration(amount=500))
    assert steps(run) == [500, 1000, 1100, 1200]
    run.prune(None, Duration(amount=500))
    assert steps(run) == [500, 1000, 1100, 1200]
    run.prune(1, best=1000)
    assert steps(run) == [1000, 1200]
    run.prune(1)
    assert steps(run) == [1200]


@pytest.mark.parametrize(
    ("every", "kept"),
    [("1000 steps", [1050, 2100, 3150]), ("8000 samples", [1050, 2100, 3150]), ("2e5 tokens", [2100])],
)
def test_where_none_is_just_there_the_next_is_kept(tmp_path: Path, every: str, kept: list[int]) -> None:
    run = RunDirectory(tmp_path)
    for step in range(350, 3501, 350):
        save(run, step)
        run.prune(1, Duration.model_validate(every))
    assert steps(run) == [*kept, 3500]


def test_the_newest_whole_one_stays_where_newer_ones_are_damaged(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    paths = [save(run, step) for step in range(1, 6)]
    (paths[4] / "resume.json").write_text("{")
    (paths[3] / "model.safetensors").unlink()
    assert [is_whole(path) for path in paths] == [True, True, True, False, False]
    run.prune(1)
    assert steps(run) == [3, 5]
    assert (progress_of(paths[2]), progress_of(paths[4])) == (Progress(3, 24, 300), None)


def test_a_new_run_in_the_folder_replaces_the_old_one_when_it_has_a_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (100, 200, 300):
        save(run, step)
    assert [path.name for path in run.set_aside(after=100)] == ["step-200", "step-300"]
    assert run.newest() == tmp_path / "step-100", "the one to go on from"
    assert [path.name for path in run.set_aside()] == ["step-100"]
    run.drop_earlier()
    assert names(run) == ["step-100.earlier", "step-200.earlier", "step-300.earlier"], (
        "the new run has none yet"
    )
    RunDirectory(tmp_path).tidy()  # it never had one
    assert names(run) == ["step-100", "step-200", "step-300"]
    run.set_aside()
    save(run, 7)
    RunDirectory(tmp_path).tidy()
    assert run.newest() == tmp_path / "step-7", (
        "not step-300, though the process was killed before it could drop that"
    )
    run.drop_earlier()
    assert names(run) == ["step-7"]


def test_a_damaged_one_is_passed_over_and_stays(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for _ in range(2):
        save(run, 1), save(run, 2)
        assert run.pass_over(tmp_path / "step-2") == tmp_path / "step-2.damaged"
        run.tidy()
        assert names(run) == ["step-1", "step-2.damaged"]
        shutil.rmtree(tmp_path / "step-1")


def test_killed_between_the_renames_that_replace_a_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    save(run, 4).rename(tmp_path / "step-4.old")
    write(tmp_path / "step-4.tmp", 4)
    run.tidy()
    assert names(run) == ["step-4"] and is_whole(tmp_path / "step-4")


@examples(60)
@given(
    saves=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    keep=st.integers(1, 3),
    keep_every=st.none() | st.integers(1, 12).map(lambda n: Duration(amount=n)),
    replaced=st.sets(st.integers(0, 11)),
    killed=st.lists(st.integers(0, 8), max_size=8),
)
def test_killed_at_any_change_to_the_folder(
    saves: list[int], keep: int, keep_every: Duration | None, replaced: set[int], killed: list[int]
) -> None:
    """A run that saves after so many steps each, begun anew now and then, killed at some changes and started
    again."""
    with tempfile.TemporaryDirectory() as where:
        run, ends = RunDirectory(where), iter(killed)
        newest: Path | None = None
        for at, more in enumerate(saves):
            if at in replaced:
                run.set_aside()
            newest = save(run, more + (step_of(run.saved()[-1]) if run.saved() else 0))
            try:
                with killed_at(next(ends, 10**6)):
                    run.point(newest)
                    run.drop_earlier()
                    run.prune(keep, keep_every)
                first = {int(step // keep_every.amount) for step in steps(run)} - {0} if keep_every else set()
                assert len(steps(run)) <= keep + len(first)
            except Killed:
                RunDirectory(where).tidy()
            assert run.newest() == newest and all(is_whole(path) for path in run.saved())
            assert not [name for name in names(run) if name.endswith((".tmp", ".old"))]
