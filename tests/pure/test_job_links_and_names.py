"""Links in a run's folder, which nothing is written through; and names that would steer a terminal, which are
shown escaped."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console as Terminal
from safetensors.torch import save_file
from test_monitor_plot import write_log
from test_run_directory import save

from polyreme.checkpoint.direct_reader import DirectFile
from polyreme.checkpoint.formats import deepspeed
from polyreme.checkpoint.listing import listing
from polyreme.checkpoint.run_directory import RunDirectory
from polyreme.cli import checkpoint
from polyreme.config import Config
from polyreme.config.describe import toml
from polyreme.errors import CheckpointError, ConfigError, DataError, Problem, printable
from polyreme.job import run as train
from polyreme.monitor.console import Console
from polyreme.monitor.jsonl import JSONL
from polyreme.monitor.plot import plot_losses
from polyreme.monitor.record import Run

RUN = Run(model="m", parameters=1, ranks=1, stage=0, dtype="fp32", steps=1, step=1, config={})
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.\udc80"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.\udc80"


def plot(folder: Path) -> None:
    plot_losses(write_log(folder, [2.0, 1.0], {}), folder / "loss.png")


WRITERS: dict[str, Callable[[Path], object]] = {
    "log.jsonl": lambda folder: JSONL(folder).start(RUN),
    "loss.png": plot,
    "latest.tmp": lambda folder: RunDirectory(folder).point(folder / "step-3"),
    "model.safetensors": lambda folder: DirectFile(folder / "model.safetensors", write=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("four years\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError) as caught:
        WRITERS[name](tmp_path / "run")
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "mine").read_text() == "four years\n"
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).touch()
    WRITERS[name](tmp_path / "run")


@pytest.mark.parametrize("name", ["log.jsonl", "loss.png", "latest.tmp"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError) as caught:
        WRITERS[name](tmp_path)
    assert caught.value.errno == errno.ENXIO


def test_latest_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("four years\n")
    (tmp_path / "latest").symlink_to(tmp_path / "mine")
    RunDirectory(tmp_path).point(save(RunDirectory(tmp_path), 3))
    assert (tmp_path / "mine").read_text() == "four years\n" and (
        tmp_path / "latest"
    ).read_text() == "step-3\n"


@pytest.mark.parametrize("name", train.WRITTEN)
def test_a_run_says_so_before_it_begins(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path.parent / "nothing")
    config = Config.load({"model": {"config": {"model_type": "llama"}}, "data": {"path": __file__},
                          "checkpoint": {"folder": str(tmp_path)}})  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=rf"{name} in it is a symbolic link, to .*nothing, and nothing is written.*\n.*remove the link",
    ):
        train.check_sources(config)
    (tmp_path / name).unlink()
    train.check_sources(config)


def test_latest_of_deepspeed_stays_in_its_folder(tmp_path: Path) -> None:
    for name in ("elsewhere", "run/step5"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mp_rank_00_model_states.pt").touch()
    run = tmp_path / "run"
    (run / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for tag, found in (
        ("step5\n", run / "step5"),
        ("nothing", None),
        ("", None),
        (".", None),
        ("a\0b", None),
        ("x" * 200, None),
    ):
        (run / "latest").write_text(tag)
        assert deepspeed.find(run) == found, tag
    for tag in ("../elsewhere", str(tmp_path / "elsewhere"), "linked", "step5/../../elsewhere"):
        (run / "latest").write_text(tag)
        with pytest.raises(
            CheckpointError,
            match=r"latest names '.*', which leads to .*/elsewhere: if you trust that, load it by",
        ):
            deepspeed.find(run)


def test_names_are_shown_escaped(tmp_path: Path) -> None:
    assert printable(EVIL) == ESCAPED and printable("é 模型\n\t🚣") == "é 模型\n\t🚣"
    for error in (
        CheckpointError(f"{EVIL} is damaged"),
        DataError(EVIL),
        ConfigError([Problem(EVIL, EVIL, EVIL, EVIL)]),
    ):
        assert str(error).replace("\n", "").isprintable() and ESCAPED in str(error)
    assert json.loads(toml(EVIL)) == EVIL and toml(EVIL).isprintable()
    assert toml({EVIL: 1, "a-b": "é"}).isprintable() and toml({EVIL: 1, "a-b": "é"}).endswith('a-b = "é"}')
    terminal = io.StringIO()
    Console(1, Terminal(file=terminal, width=80)).message(EVIL)
    assert terminal.getvalue() == f"{ESCAPED}\n"
    monitor = JSONL(tmp_path)
    monitor.start(RUN)
    monitor.message(EVIL)
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["text"] == EVIL


def test_tensors_are_listed_escaped(tmp_path: Path) -> None:
    name = EVIL[:-1]  # what UTF-8 can hold
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    terminal = io.StringIO()
    Terminal(file=terminal, width=200).print(checkpoint.render(listing(tmp_path)))
    assert printable(terminal.getvalue()) == terminal.getvalue() and printable(name) in terminal.getvalue()
