"""Runs of `polyreme train` whose ranks are killed while they write, or whose disk is full: nothing complete
is lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_job_resume_ranks import CONFIG, assert_same, names, numbers, said

from command import running, until, write_text
from examples import whole
from polyreme.checkpoint import manifest
from polyreme.checkpoint.run_directory import RunDirectory, is_whole, step_of
from polyreme.checkpoint.writer import Writer
from polyreme.config import Config
from polyreme.errors import CheckpointError
from polyreme.job import run as train
from pool import Ranks, RanksFailed

END_WITHIN = 30.0  # seconds from a kill to the end of the command
PLAIN = ["precision.compute=bf16", "zero.stage=1", "checkpoint.every=1", "checkpoint.keep=2"]
BACKGROUND = [
    "precision.compute=bf16",
    "zero.stage=3",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "checkpoint.background=true",
]

Patches = pytest.MonkeyPatch


def killed_in(patches: Patches, place: Any, name: str, here: Callable[..., bool]) -> None:
    """Kill this rank where it calls `name` of `place` with arguments that are `here`."""
    whole = getattr(place, name)

    def dying(*args: Any, **options: Any) -> Any:
        if here(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **options)

    patches.setattr(place, name, dying)


MOMENTS: dict[str, tuple[int, Callable[[Patches], None], str, int]] = {
    "a rank writes its part": (
        1,
        lambda p: killed_in(p, Writer, "_put_segment", lambda writer, *_: is_third(writer)),
        "step-2.tmp",
        1,
    ),
    "all is there but resume.json": (
        0,
        lambda p: killed_in(p, manifest, "write", lambda at, _: at.name == "step-4.tmp"),
        "step-4.tmp",
        3,
    ),
    "about to be named": (
        0,
        lambda p: killed_in(p, Path, "rename", lambda path, _: path.name == "step-5.tmp"),
        "step-5.tmp",
        4,
    ),
    "named, and not pointed to": (
        0,
        lambda p: killed_in(p, RunDirectory, "point", lambda _, path: path.name == "step-6"),
        "step-6",
        6,
    ),
    "the oldest is being deleted": (
        0,
        lambda p: killed_in(p, shutil, "rmtree", is_half_gone),
        "step-5.old",
        7,
    ),
}
"""Which rank dies, when, what is then in the folder, and the step from which the run goes on."""

blocks = Counter[str]()


def is_third(writer: Writer) -> bool:
    """Whether this rank has written two blocks of step 2, or more: its threads count at the same time."""
    blocks[writer._folder.name] += 1
    return blocks["step-2.tmp"] >= 3


def is_half_gone(path: Any, **_: Any) -> bool:
    """Whether this is the checkpoint of step 5, whose turn it is to be deleted; a file of it is gone then."""
    if Path(path).name != "step-5.old" or not Path(path).exists():
        return False
    (path / "model.safetensors").unlink(missing_ok=True)
    return True


def job(rank: int, world: int, folder: Path, changes: list[str], moment: str | None = None) -> None:
    """What `polyreme train` runs on a rank, which may be killed at one of MOMENTS."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patches:
        patches.setattr(train, "close", lambda: None)  # the ranks are used again
        if moment is not None and MOMENTS[moment][0] == rank:
            blocks.clear()
            MOMENTS[moment][1](patches)
        train.run(Config.load("run.toml", changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """A folder with the runs `plain` and `background` on two ranks, which nothing disturbed."""
    made = tmp_path_factory.mktemp("crash")
    write_text(made)
    (made / "run.toml").write_text(CONFIG)
    for name, settings in (("plain", PLAIN), ("background", BACKGROUND)):
        ranks(2, job, made, [*settings, f"checkpoint.folder={name}"])
    return made


@pytest.mark.parametrize(("mode", "moments"), [("plain", [0, 1, 2]), ("background", [3, 4])])
def test_killed_in_the_middle_of_a_save(folder: Path, ranks: Ranks, mode: str, moments: list[int]) -> None:
    settings = [*(PLAIN if mode == "plain" else BACKGROUND), f"checkpoint.folder={mode}-killed"]
    run = folder / f"{mode}-killed"
    chosen = [list(MOMENTS)[at] for at in moments]
    for moment in chosen:
        with pytest.raises(RanksFailed, match="SIGKILL"):
            ranks(2, job, folder, settings, moment)
        assert MOMENTS[moment][2] in names(run), moment
    ranks(2, job, folder, settings)
    assert_same(run, folder / mode)
    assert (
        names(run) == names(folder / mode) == ["latest", "latest-checkpoint", "log.jsonl", "step-7", "step-8"]
    )
    went_on = [
        int(step) for line in said(run) for step in re.findall(r"^resumed from \S+/step-(\d+): ", line)
    ]
    assert went_on == [MOMENTS[moment][3] for moment in chosen]


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system of `size` bytes at `place`; what it gives changes its size. Skips the test where none can
    be mounted."""
    place.mkdir()

    def mount(options: str) -> int:
        return subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False
        ).returncode

    if shutil.which("mount") is None or mount(f"size={size}") != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield lambda wanted: mount(f"remount,size={wanted}") and None
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def bytes_of(checkpoint: Path) -> int:
    """On a disk that has pages of 4 KiB."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in checkpoint.rglob("*") if path.is_file())


@pytest.mark.parametrize("mode", [pytest.param("plain", marks=whole), "background"])
def test_the_disk_is_full(folder: Path, ranks: Ranks, mode: str) -> None:
    """There is room for one checkpoint and a half, so every save after the first fails, the last one, too,
    and with it the run."""
    run = folder / f"{mode}-full"
    settings = [*(PLAIN if mode == "plain" else BACKGROUND), f"checkpoint.folder={mode}-full"]
    settings += ["checkpoint.every=3", "checkpoint.keep=none"]
    with small_disk(run, int(1.5 * bytes_of(folder / mode / "step-8")) + 65536) as resize:
        with pytest.raises(RanksFailed, match="step-8 was not written") as caught:
            ranks(2, job, folder, settings)
        assert (
            all(isinstance(error, CheckpointError) for error in caught.value.exceptions.values())
            and len(caught.value.exceptions) == 2
        )
        assert (
            names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-3"]
            and (run / "latest").read_text() == "step-3\n"
            and is_whole(run / "step-3")
        )
        assert len(numbers(run)) == 8, "it went on"
        (line,) = [line for line in said(run) if line.endswith("; training goes on")]
        needed, free = FULL.fullmatch(line).groups()  # type: ignore[union-attr]
        assert 0 < int(free.replace(",", "")) < int(needed.replace(",", "")) < bytes_of(run / "step-3")
        resize(10 * bytes_of(run / "step-3"))
        ranks(2, job, folder, settings)
        assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-3", "step-6", "step-8"]
        assert_same(run, folder / mode)


FULL = re.compile(
    r"the checkpoint \S+-full/step-6 was not written, rank 0: "
    r"No space left on device: its tensors need ([0-9,]+) bytes, "
    r"and ([0-9,]+) are free in \S+-full; training goes on"
)


def test_a_rank_of_the_command_is_killed_while_it_saves(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    """The other ends soon, the exit status says it, and the same job goes on from the newest checkpoint."""
    for name in ("text.txt", "run.toml"):
        shutil.copy(folder / name, tmp_path)
    run = tmp_path / "run"
    changes = [*BACKGROUND, "checkpoint.folder=run"]
    words = [word for change in [*changes, "train.length=100000"] for word in ("--set", change)]
    with running(tmp_path, "train", "run.toml", "-n", "2", *words) as command:
        until(lambda: (run / "latest").exists(), "there is a checkpoint")
        victim = next(pid for pid, rank in command.descendants().items() if rank == 1)
        until(lambda: any(run.glob("step-*.tmp")), "another is being written")
        os.kill(victim, signal.SIGKILL)
        at = time.monotonic()
        status, _, errors = command.end()
        assert time.monotonic() - at < END_WITHIN
    assert (
        status == 1
        and "error: rank 1 of 2 failed first: it was ended by SIGKILL\n" in errors
        and "Traceback" not in errors
    )
    assert "polyreme: " not in errors, "what the other was writing at that moment is no error of its own"
    newest = RunDirectory(run).newest()
    assert newest is not None
    last = step_of(newest) + 1
    ranks(2, job, tmp_path, [*changes, f"train.length={last}"])
    assert any(line.startswith(f"resumed from run/{newest.name}: ") for line in said(run))
    assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", newest.name, f"step-{last}"]
