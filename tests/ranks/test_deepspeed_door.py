"""Scripts that import DeepSpeed, as real ranks: under `polyreme launch --deepspeed`, and with the options of
DeepSpeed's own command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import SOURCE, polyreme, running, until
from examples import whole
from polyreme.compat import finder
from polyreme.compat.deepspeed.launcher import runner
from polyreme.errors import LaunchError
from polyreme.launch.torchrun import RanksFailedError, launch
from warm import WarmPython

SCRIPT = """
import json, os, subprocess, sys
from importlib.metadata import version
from pathlib import Path

import deepspeed
import polyreme.compat.deepspeed

first = os.environ["RANK"] == "0"
child = "from importlib import metadata; import deepspeed as d; print(d.__version__, metadata.version('deepspeed'))"
fact = {
    "own": deepspeed is polyreme.compat.deepspeed,
    "versions": [deepspeed.__version__, version("deepspeed")],
    "child": subprocess.check_output([sys.executable, "-c", child], text=True).split() if first else [],
    "arguments": sys.argv[1:],
    "variables": dict(os.environ),
}
Path(f"fact-{os.environ['RANK']}").write_text(json.dumps(fact))
print("rank", os.environ["RANK"], flush=True)
print("error of", os.environ["RANK"], file=sys.stderr, flush=True)
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script that leaves facts in it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def facts(folder: Path) -> list[dict[str, Any]]:
    """Of both ranks, which must have found the door, as must the child that the first has."""
    found = [json.loads((folder / f"fact-{rank}").read_text()) for rank in range(2)]
    assert found[0]["child"] == ["0.19.8", "0.19.8"]
    for rank, fact in enumerate(found):
        assert fact["own"] and fact["versions"] == ["0.19.8", "0.19.8"]
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        assert expected.items() <= fact["variables"].items()
    return found


def test_launch_with_the_door(folder: Path) -> None:
    words = ["launch", "--deepspeed", "-n", "2", "script.py", "--deepspeed", "ds.json"]
    status, output, errors = polyreme(folder, *words, warm=False)
    assert status == 0, errors
    assert [fact["arguments"] for fact in facts(folder)] == [["--deepspeed", "ds.json"]] * 2
    assert sorted(output.splitlines()) == ["rank 0", "rank 1"]


def test_without_the_door_there_is_none(folder: Path) -> None:
    before = dict(os.environ)
    Path("plain.py").write_text(
        "import os, sys; assert not [m for m in sys.meta_path if 'polyreme.compat' in repr(m)]"
    )
    launch(["plain.py"], 2)
    assert dict(os.environ) == before


def test_deepspeeds_own_command(folder: Path) -> None:
    words = ["--num_gpus", "2", "script.py", "--flag", "$HOME ${local_rank}"]
    process = WarmPython(["-m", "polyreme", "deepspeed", *words], folder, os.environ)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.count("error of")) == (0, 2), errors
    for rank, fact in enumerate(facts(folder)):
        assert fact["arguments"] == [f"--local_rank={rank}", "--flag", "$HOME ${local_rank}"]
        expected = {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}
        assert expected.items() <= fact["variables"].items()
    assert sorted(output.splitlines()) == ["rank 0", "rank 1"]


def test_port_log_and_module(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--num_gpus", "2", "--no_local_rank", "--master_port", port, "--module"]
        words += ["--enable_each_rank_log", "logs $x", "script"]
        with pytest.raises(LaunchError, match=f"cannot meet at port {port}"):
            runner.main(words)
    runner.main(words)
    assert capfd.readouterr() == ("", "")
    for rank, fact in enumerate(facts(folder)):
        assert fact["variables"]["MASTER_PORT"] == port and fact["arguments"] == []
        (log,) = (folder / "logs $x").glob(f"*_rank{rank}.log")
        assert log.read_text() == f"rank {rank}\nerror of {rank}\n"
    after = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert after == before


def test_a_program(folder: Path) -> None:
    for name, body in (
        ("program", f'exec {sys.executable} script.py "$@"'),
        ("fails", "[ $RANK = 1 ] && exit 3\nsleep 600"),
    ):
        Path(name).write_text(f"#!/bin/sh\n{body}\n")
        Path(name).chmod(0o755)
    words = ["--num_gpus", "2", "--no_python"]
    runner.main([*words, "./program", "a b"])
    assert [fact["arguments"] for fact in facts(folder)] == [[f"--local_rank={r}", "a b"] for r in range(2)]
    with pytest.raises(LaunchError, match="no program that can be run"):
        runner.main([*words, "./none"])
    with pytest.raises(RanksFailedError, match="rank 1 of 2 failed first: it ended with exit status 3"):
        runner.main([*words, "./fails"])


def test_a_signal_ends_a_program(folder: Path) -> None:
    Path("waits").write_text("#!/bin/sh\ntouch ready-$RANK\nexec sleep 600\n")
    Path("waits").chmod(0o755)
    with running(folder, "deepspeed", "--num_gpus", "2", "--no_python", "./waits") as command:
        until(lambda: len(list(folder.glob("ready-*"))) == 2, "both run")
        command.process.send_signal(signal.SIGINT)
        assert command.end()[0] == 130


@whole
def test_by_its_modules_name(folder: Path) -> None:
    """In a process that has the door, as where a script starts others through DeepSpeed's launcher."""
    words = ["--num_accelerators", "2", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", *words],
        env={**os.environ, **finder.variables("deepspeed", {"PYTHONPATH": SOURCE})},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts(folder)
