"""A run of `polyreme train` that is killed, stopped or damaged, and goes on: with the numbers of one that
never was."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from command import TINY, running, until, write_text
from polyreme.checkpoint import save as saving
from polyreme.checkpoint.run_directory import BEST, LINK
from polyreme.config import Config
from polyreme.engine import Engine
from polyreme.errors import CheckpointError, ConfigError, DataError, PolyremeError
from polyreme.job import run as train
from polyreme.monitor import read_log
from pool import Ranks, RanksFailed

CONFIG = """
[model.config]
model_type = "gpt2"
n_positions = 32
n_embd = 16
n_layer = 2
n_head = 2
resid_pdrop = 0.1
embd_pdrop = 0.1
attn_pdrop = 0.1
[data]
path = "text.txt"
sequence = 16
vocab_size = 300
[batch]
size = 4
micro = 1
[optimizer]
lr = 1e-2
[lr_schedule]
name = "cosine"
warmup = 3
total = 20
[train]
length = 8
validate_every = 3
validate_batches = 2
[checkpoint]
every = 3
keep = "none"
[monitor]
plot = false
console = false
"""
OF_THE_PROCESS = (
    "seconds",
    "elapsed",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
    "memory_bytes",
    "traffic",
)
"""What differs between two processes that compute the same."""


def job(
    rank: int,
    world: int,
    folder: Path,
    changes: list[str],
    patch: str | None = None,
    at: int = 0,
    losses: dict[int, float] | None = None,
) -> dict[str, Any]:
    """What `polyreme train` runs on a rank, where after step `at` rank 1 gets a signal, or the disk is
    full. `losses`: the validation losses by step."""
    step, write = Engine.train_step, saving.write

    def train_step(engine: Engine, batch: Any) -> Any:
        if engine.state.step == at and rank == 1 and patch in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if patch == "kill" else signal.SIGTERM)
        return step(engine, batch)

    def fill(path: Path, *args: Any) -> None:
        if patch == "full" and path.name == f"step-{at}":
            raise CheckpointError(f"the checkpoint {path} was not written: the disk is full")
        write(path, *args)

    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patches:
        patches.setattr(Engine, "train_step", train_step)
        patches.setattr(saving, "write", fill)
        patches.setattr(train, "close", lambda: None)  # the ranks are used again
        if losses is not None:
            patches.setattr(train, "validate", lambda engine, *_: losses.get(engine.state.step, math.inf))
        return dict(vars(train.run(Config.load("run.toml", changes))))


def refusals(rank: int, world: int, folder: Path, runs: list[list[str]]) -> list[PolyremeError]:
    """What jobs raise."""
    found = []
    for changes in runs:
        with pytest.raises(PolyremeError) as caught:
            job(rank, world, folder, changes)
        found.append(caught.value)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """A folder with the run `whole`, of 8 steps on two ranks, which nothing disturbed."""
    made = tmp_path_factory.mktemp("resume")
    write_text(made)
    (made / "run.toml").write_text(CONFIG)
    ranks(2, job, made, ["checkpoint.folder=whole"])
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def said(run: Path) -> list[str]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "message"]


def numbers(run: Path) -> list[dict[str, Any]]:
    """The log, without what is of the process."""
    return [
        {k: v for k, v in step.items() if k not in OF_THE_PROCESS} for step in read_log(run / "log.jsonl")[1]
    ]


def tensors(checkpoint: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkpoint).as_posix(): path.read_bytes()
        for path in checkpoint.rglob("*.safetensors")
    }


def assert_same(run: Path, whole: Path) -> None:
    assert tensors(run / "step-8") == tensors(whole / "step-8") and len(tensors(run / "step-8")) > 2
    assert numbers(run) == numbers(whole) and len(numbers(run)) == 8


def test_a_killed_run_goes_on_as_if_it_had_not_been(folder: Path, ranks: Ranks) -> None:
    run, sets = folder / "killed", ["checkpoint.folder=killed"]
    for at in (5, 7):  # before any of step 7 is saved, step 4 is done a second time
        with pytest.raises(RanksFailed, match="SIGKILL"):
            ranks(2, job, folder, sets, "kill", at)
    summaries = ranks(2, job, folder, sets)
    assert_same(run, folder / "whole")
    assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-3", "step-6", "step-8"]
    assert [line for line in said(run) if line.startswith("resumed")] == [
        "resumed from killed/step-3: 3 steps, 192 tokens", "resumed from killed/step-6: 6 steps, 384 tokens",
    ]  # fmt: skip
    assert summaries[0]["steps"] == summaries[1]["steps"] == 8


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(folder: Path, ranks: Ranks) -> None:
    """One rank alone gets the signal."""
    run = folder / "stopped"
    sets = [
        "checkpoint.folder=stopped",
        "checkpoint.every=2",
        "checkpoint.background=true",
        "checkpoint.keep=2",
    ]
    before = signal.getsignal(signal.SIGTERM)
    for summary in ranks(2, job, folder, sets, "stop", 4):
        assert (summary["stopped"], summary["steps"], summary["checkpoint"]) == (
            "SIGTERM",
            5,
            "stopped/step-5",
        )
    assert signal.getsignal(signal.SIGTERM) == before
    for summary in ranks(2, job, folder, sets):
        assert (summary["stopped"], summary["steps"]) == (None, 8)
    assert_same(run, folder / "whole")
    assert (
        names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-6", "step-8"]
        and (run / "latest").read_text() == "step-8\n"
    )


def test_a_damaged_checkpoint_is_passed_over_on_every_rank(folder: Path, ranks: Ranks) -> None:
    run, sets = folder / "damaged", ["checkpoint.folder=damaged"]
    shutil.copytree(folder / "whole", run, symlinks=True)
    # one that is seen to be damaged when it is opened, one only when all of it is read
    for name in ("step-8", "step-6"):
        file = run / name / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[:-100] if name == "step-8" else data[:-100] + bytes(100))
    ranks(2, job, folder, sets)
    assert_same(run, folder / "whole")
    assert names(run) == [
        "latest",
        "latest-checkpoint",
        "log.jsonl",
        "step-3",
        "step-6",
        "step-6.damaged",
        "step-8",
        "step-8.damaged",
    ]
    told = said(run)
    at = told.index("resumed from damaged/step-3: 3 steps, 192 tokens")
    assert (
        told[at - 2].startswith("damaged/step-8 cannot be used (it is now step-8.damaged): ")
        and "model.safetensors" in told[at - 2]
    )
    assert told[at - 1].startswith("damaged/step-6 cannot be used (it is now step-6.damaged): ")
    for name in ("step-3", "step-6", "step-8"):
        (run / name / "model.safetensors").unlink()
    for (error,) in ranks(2, refusals, folder, [sets]):
        assert isinstance(error, ConfigError)
        assert "no run can go on from the checkpoints in it" in str(error)
    assert {"step-3", "step-6", "step-8"} < set(names(run))


def test_where_all_checkpoints_turn_out_to_be_damaged(folder: Path, ranks: Ranks) -> None:
    """Which is seen when they are read, by every rank, and says what was seen and what to do as where they
    cannot even be opened."""
    run = folder / "unreadable"
    shutil.copytree(folder / "whole", run, symlinks=True)
    for file in run.glob("step-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    before = names(run)
    sets = ["checkpoint.folder=unreadable"], ["checkpoint.folder=begun", "checkpoint.resume=unreadable"]
    said = (
        r"(?s)checkpoint\.folder.*no run can go on from the checkpoints in it.*--no-resume",
        r"(?s)checkpoint\.resume.*no run can go on from it.*name a checkpoint",
    )
    for found in ranks(2, refusals, folder, [[*each, "train.length=12"] for each in sets]):
        for error, message in zip(found, said, strict=True):
            assert isinstance(error, ConfigError) and re.search(message, str(error)), error
            assert str(error).count("step-8") == 1
    assert names(run) == before


@pytest.mark.parametrize("background", ["false", "true"])
def test_training_goes_on_where_a_checkpoint_cannot_be_written(
    folder: Path, ranks: Ranks, background: str
) -> None:
    run = folder / f"full-{background}"
    ranks(2, job, folder, [f"checkpoint.folder={run.name}", f"checkpoint.background={background}"], "full", 6)
    assert_same(run, folder / "whole")
    assert (
        names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-3", "step-8"]
        and (run / "latest").read_text() == "step-8\n"
    )
    assert f"the checkpoint {run.name}/step-6 was not written: the disk is full; training goes on" in said(
        run
    )


def test_the_best_checkpoint_is_kept_beside_the_latest(folder: Path, ranks: Ranks) -> None:
    """One that cannot be written is none, and does not have the one before it deleted. A run that goes on
    knows the best so far."""
    run = folder / "best"
    sets = ["checkpoint.folder=best", "checkpoint.every=none", "checkpoint.keep=1", "train.validate_every=2"]
    sets += ["checkpoint.keep_best=true"]
    for background in ("false", "true"):
        shutil.rmtree(run, ignore_errors=True)
        more = [f"checkpoint.background={background}", "train.length=5"]
        summary = ranks(2, job, folder, [*sets, *more], "full", 4, {2: 3.0, 4: 2.0, 5: 3.5})[0]
        assert (summary["best"], summary["best_validation_loss"]) == ("best/step-2", 3.0)
        assert names(run) == [BEST, "latest", LINK, "log.jsonl", "step-2", "step-5"]
    for summary in ranks(2, job, folder, sets, "", 0, {6: 2.5, 8: 2.7}):
        assert (summary["best"], summary["best_validation_loss"]) == ("best/step-6", 2.5)
    assert names(run) == [BEST, "latest", LINK, "log.jsonl", "step-6", "step-8"]
    for summary in ranks(2, job, folder, [*sets, "train.length=10"], "", 0, {10: 2.6}):
        assert summary["best"] == "best/step-6"
    assert (run / BEST).readlink() == Path("step-6")
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "latest-checkpoint")
    newest = transformers.AutoModelForCausalLM.from_pretrained(run / "step-10")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), newest.parameters(), strict=True))
    ranks(2, job, folder, [*sets, "train.length=7", "checkpoint.resume=best/step-6"], "", 0, {7: 9.0})
    assert names(run) == [BEST, "latest", LINK, "log.jsonl", "step-6", "step-7"]


def test_a_run_that_has_ended_goes_on_where_it_is_made_longer(
    folder: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sets = folder / "longer", ["checkpoint.folder=longer", "checkpoint.keep=1"]
    shutil.copytree(folder / "whole", run, symlinks=True)
    before = (run / "log.jsonl").read_bytes()
    for summary in ranks(2, job, folder, sets):
        assert (summary["steps"], summary["tokens"], summary["checkpoint"]) == (8, 512, "longer/step-8")
        assert (
            summary["validation_loss"] == numbers(run)[-1]["validation_loss"] and summary["bits_per_byte"] > 0
        )
    assert (run / "log.jsonl").read_bytes() == before
    monkeypatch.chdir(folder)
    config = Config.load("run.toml", [*sets, "monitor.console=true", "optimizer.lr=1e-3"]).resolve(2)
    assert vars(train.finished(config)) == summary, "found before any rank starts"
    assert capsys.readouterr().out == (
        "nothing to do: longer/step-8 is the end of this run, with 8 steps and 512 tokens\n"
        "changed since then: optimizer.lr = 0.001, and was 0.01\n"
        "raise train.length (now 8 steps) to go on from there, or begin anew with --no-resume\n"
    )
    sets += ["train.length=9", "batch.size=8", "batch.micro=2", "data.shuffle=false", "optimizer.lr=1e-3"]
    ranks(1, job, folder, sets)
    assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-9"]
    assert [step["tokens"] for step in numbers(run)[-2:]] == [512, 640]
    told = said(run)
    assert "changed since then: data.shuffle = false, and was true: the training data begins anew" in told
    assert "changed since then: optimizer.lr = 0.001, and was 0.01" in told
    assert any(line.startswith("batch.size is 8, and was 4") for line in told)
    assert any(line.startswith("saved on another mesh") for line in told)


def test_begun_anew_or_from_elsewhere(folder: Path, ranks: Ranks) -> None:
    run, sets = folder / "other", ["checkpoint.folder=other", "train.length=7"]
    for name in ("step-6", "step-8"):
        shutil.copytree(folder / "whole" / name, run / name)
    ranks(2, job, folder, [*sets, "checkpoint.resume=never", "checkpoint.every=none", "train.length=2"])
    assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-2"]
    assert "step-6, step-8 in other, of an earlier run, will go when the first checkpoint is there" in said(
        run
    )
    ranks(2, job, folder, [*sets, "checkpoint.resume=whole/step-6"])
    assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-7"]
    shutil.rmtree(run / "step-7")
    shutil.copytree(folder / "whole" / "step-8", run / "step-8")
    # which goes before what is in the folder
    ranks(2, job, folder, [*sets, "checkpoint.resume=whole/step-6"])
    assert names(run) == ["latest", "latest-checkpoint", "log.jsonl", "step-7"] and len(numbers(run)) == 2 + 1


def test_another_tokenizer_is_refused(folder: Path, ranks: Ranks) -> None:
    (folder / "changed.txt").write_text(
        (folder / "text.txt").read_text() + "Quite another text, with words of its own. " * 40
    )
    changes = ["checkpoint.folder=changed", "checkpoint.resume=whole", "data.path=changed.txt"]
    for (error,) in ranks(2, refusals, folder, [[*changes, "train.length=9"]]):
        assert isinstance(error, DataError) and 'Set data.tokenizer = "whole/step-8"' in str(error)


def test_sigterm_to_the_command(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    log = tmp_path / "run" / "log.jsonl"
    sets = ("--set", "train.validate_every=none", "--set", "train.length=100000")
    with running(tmp_path, "train", "tiny.toml", "-n", "2", *sets) as command:
        until(lambda: log.exists() and '"kind": "step"' in log.read_text(), "a step is done")
        command.process.send_signal(signal.SIGTERM)
        status, output, errors = command.end()
    last = read_log(log)[1][-1]["step"]
    assert (
        status == 0
        and f"stopped by SIGTERM after step {last}; the same command goes on from run/step-{last}\n" in output
    ), errors
    assert names(tmp_path / "run") == ["latest", "latest-checkpoint", "log.jsonl", f"step-{last}"]
