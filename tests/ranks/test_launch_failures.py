"""Ranks that raise, are killed or interrupted in the middle of training: the run ends soon, says who it was,
and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import TINY, Command, running, until, write_text

END_WITHIN = 30.0  # seconds from the failure to the end of the run

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import polyreme

stage, how, rank = int(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
torch.manual_seed(rank)
steps = 0

def loss_fn(output, target):
    if rank == 1 and steps == 3 and how != "wait":
        Path("failed").touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "memory":
            torch.empty(2**50)
        raise ValueError(f"no good at step {steps}")
    return (output - target).square().mean()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

config = {"zero": {"stage": stage, "min_bucket": 0}, "batch": {"size": 4}}
engine = polyreme.initialize(Model(), config, loss_fn=loss_fn)
while True:
    steps += 1
    engine.train_step((torch.randn(2, 8), torch.randn(2, 8)))
    if steps == 3:
        Path(f"ready-{rank}").touch()
"""


def ended(command: Command, since: Callable[[], float]) -> tuple[int, str, str]:
    """As `Command.end`, within the promised time after `since`, and with nothing in shared memory that is of
    any rank."""
    ranks = {pid for pid, rank in command.descendants().items() if rank is not None}
    result = command.end()
    seconds = time.time() - since()
    assert seconds < END_WITHIN, f"ended only {seconds:.1f} s later"
    left = [
        entry.name for entry in Path("/dev/shm").glob("*") if any(str(pid) in entry.name for pid in ranks)
    ]
    assert not left, "shared memory outlived the run"
    return result


def ending(errors: str, folder: Path) -> tuple[list[str], str]:
    """The lines of an error, and the traceback in the file that the last one names, the only one."""
    *said, last = errors.splitlines()
    [file] = folder.glob("traceback-*")
    assert last == f"traceback: {file} on {socket.gethostname()}" and "Traceback" not in errors, errors
    return said, file.read_text()


@pytest.mark.parametrize(("stage", "how"), [(1, "raise"), (3, "kill"), (2, "memory")])
def test_a_rank_fails_while_its_peer_waits_in_a_collective(tmp_path: Path, stage: int, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with running(tmp_path, "launch", "-n", "2", "script.py", str(stage), how) as command:
        until((tmp_path / "failed").exists, "rank 1 fails")
        status, output, errors = ended(command, lambda: (tmp_path / "failed").stat().st_mtime)
    assert (status, output) == (1, "")
    assert errors.startswith("error: rank 1 of 2 failed first")
    if how == "kill":
        assert "it was ended by SIGKILL" in errors and "Traceback" not in errors
        assert not list(tmp_path.glob("traceback-*"))
    elif how == "memory":
        said = "rank 1 of 2 failed first: out of memory in engine.train_step(): 4.0 PiB were asked for\n"
        assert errors.startswith(f"error: {said}  this rank has ") and "what takes less: " in errors
        assert "Traceback" not in errors and errors.count("\n") <= 5, errors
    else:
        said, traceback = ending(errors, tmp_path)
        assert said == [
            "error: rank 1 of 2 failed first: ValueError: no good at step 3",
            "  at script.py:35: engine.train_step((torch.randn(2, 8), torch.randn(2, 8)))",
            '  at script.py:19: raise ValueError(f"no good at step {steps}")',
        ]
        assert "in loss_fn" in traceback and traceback.endswith("ValueError: no good at step 3\n")
        assert traceback.count("Traceback") == 1 and "runpy" not in traceback


PIPELINE = """
import sys
from pathlib import Path
import torch
from torch import nn
import polyreme
from polyreme.errors import BatchError

bad_stage, where = int(sys.argv[1]), sys.argv[2]
steps = calls = 0

def fail(gradient=None):
    Path("failed").touch()
    raise BatchError("no good") if where == "refused" else ValueError("no good")

class Block(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage, self.linear = stage, nn.Linear(8, 8)
    def forward(self, x):
        global calls
        x = self.linear(x).tanh()
        if self.stage == bad_stage and steps == 3:
            calls += 1
            if calls == 3:
                x.register_hook(fail) if where == "backward" else fail()
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(stage) for stage in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

config = {"mesh": {"pp": 2}, "batch": {"size": 8, "micro": 2}}
engine = polyreme.initialize(Model(), config, loss_fn=nn.functional.mse_loss)
while True:
    steps += 1
    batches = torch.Generator().manual_seed(steps)  # the same on both ranks
    engine.train_step((torch.randn(8, 8, generator=batches), torch.randn(8, 8, generator=batches)))
"""


@pytest.mark.parametrize(("stage", "where"), [(0, "backward"), (1, "refused")])
def test_a_pipeline_stage_fails_while_the_others_wait_for_it(tmp_path: Path, stage: int, where: str) -> None:
    (tmp_path / "script.py").write_text(PIPELINE)
    with running(tmp_path, "launch", "-n", "2", "script.py", str(stage), where) as command:
        until((tmp_path / "failed").exists, f"stage {stage} fails")
        status, output, errors = ended(command, lambda: (tmp_path / "failed").stat().st_mtime)
    assert (status, output) == (1, "")
    assert errors.startswith(f"error: rank {stage} of 2 failed first")
    assert f"in pipeline stage {stage}, micro-batch 2 of the step" in errors
    if where == "refused":  # an error that explains itself, for which no traceback is shown
        assert "no good" in errors and "Traceback" not in errors
    else:
        said, traceback = ending(errors, tmp_path)
        assert "in fail" in traceback and traceback.count("Traceback") == 1
        assert said[0].endswith("failed first: ValueError: no good")


def test_an_interrupt_of_the_launcher_in_the_middle_of_training(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with running(tmp_path, "launch", "-n", "2", "script.py", "2", "wait") as command:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks train")
        at = time.time()
        os.kill(command.process.pid, signal.SIGINT)
        status, output, errors = ended(command, lambda: at)
    assert (status, output, errors) == (130, "", "error: stopped by SIGINT; every rank has ended\n")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a config of a run that does not end by itself."""
    write_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY + "[launch]\nranks = 2\n")
    return tmp_path


def is_training(folder: Path) -> bool:
    log = folder / "run" / "log.jsonl"
    return log.exists() and '"kind": "step"' in log.read_text()


def test_the_rank_that_shows_the_training_job_is_killed(job: Path) -> None:
    with running(
        job, "train", "tiny.toml", "--set", "train.length=1000000", "--set", "zero.stage=3"
    ) as command:
        until(lambda: is_training(job), "training")
        at = time.time()
        os.kill(next(pid for pid, rank in command.descendants().items() if rank == 0), signal.SIGKILL)
        status, _, errors = ended(command, lambda: at)
    first, _, errors = errors.partition("\n")
    assert first == "training as tiny.toml says, on 2 ranks of this host, in the folder run"
    assert status == 1 and errors.startswith("error: rank 0 of 2 failed first: it was ended by SIGKILL")
    again = "polyreme train tiny.toml --set train.length=1000000 --set zero.stage=3\n"
    assert "\nthere is no complete checkpoint yet; this begins anew:\n  " in errors and errors.endswith(again)
    assert "Traceback" not in errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_says_how_the_run_goes_on(job: Path, ranks: int) -> None:
    """To the whole group, as a terminal sends it."""
    words = ["tiny.toml", "-n", str(ranks), "--set", "train.length=1000000"]
    with running(job, "train", *words) as command:
        until(lambda: is_training(job), "training")
        at = time.time()
        os.killpg(command.process.pid, signal.SIGINT)
        status, output, errors = ended(command, lambda: at)
    assert status == 130
    errors = errors.partition("\n")[2]  # the first line says what is done
    assert errors == "SIGINT: ending after the step under way, which is saved; again to end at once\n", errors
    [last] = [path.name for path in (job / "run").glob("step-*")]
    assert f"stopped by SIGINT after step {last[5:]}; the same command goes on from run/{last}\n" in output
    assert output.endswith(f"polyreme train {' '.join(words)}\n") and "Traceback" not in output
    assert (job / "run" / "latest-checkpoint" / "resume.json").is_file()
    assert not list((job / ".polyreme-cache").glob("*unfinished*"))
