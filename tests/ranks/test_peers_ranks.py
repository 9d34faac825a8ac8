"""Launchers of one run, as of two pods, whose ranks fail or hang, and launchers that end or hang
themselves."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from command import Command, running, until
from examples import whole
from polyreme.launch import peers

RANKS = """
import os, signal, sys, time
if "saves" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
what = sys.argv[1 + int(os.environ["RANK"])]
open("began" + os.environ["RANK"], "w")
if what == "raises":
    raise ValueError("of its own")
if what == "ends":
    sys.exit(0)
time.sleep(1000)
"""


@contextmanager
def pods(folder: Path, *words: str) -> Iterator[list[Command]]:
    """Two launchers with a rank each, once both ranks run."""
    (folder / "ranks.py").write_text(RANKS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {"POLYREME_PODS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as held:
        yield [
            held.enter_context(
                running(
                    folder, "launch", "-n", "1", *words,
                    variables={**meeting, "JOB_COMPLETION_INDEX": str(index)},
                )
            )
            for index in range(2)
        ]  # fmt: skip


@pytest.mark.parametrize("first", [pytest.param(0, marks=whole), 1])
def test_all_launchers_end_where_a_rank_of_one_fails(tmp_path: Path, first: int) -> None:
    own = ["hangs", "hangs"]
    own[first] = "raises"
    with pods(tmp_path, "--saves", "ranks.py", *own, "saves") as run:
        ended = [each.end(60) for each in run]
    assert [status for status, _, _ in ended] == [1, 1], ended
    why = f"rank {first} of 2 failed first:"
    host, [file] = socket.gethostname(), tmp_path.glob("traceback-*")
    line, where = ('at ranks.py:8: raise ValueError("of its own")', f"traceback: {file} on {host}\n")
    own = f"error: on {host}: {why} ValueError: of its own\n  {line}\n{where}"
    assert ended[first][2].endswith(own), ended
    told = f"error: every rank here was ended, too: {host}: {why} ValueError: of its own; {line}; {where}"
    assert ended[1 - first][2].endswith(told), ended


def test_a_launcher_whose_ranks_have_ended_hears_of_the_others(tmp_path: Path) -> None:
    with pods(tmp_path, "ranks.py", "ends", "hangs") as run:
        until((tmp_path / "began1").exists, "rank 1 runs")
        run[1].process.send_signal(signal.SIGTERM)
        ended = [each.end(60) for each in run]
    assert [status for status, _, _ in ended] == [143, 143], ended
    assert ended[0][2].endswith(": stopped by SIGTERM; every rank has ended\n"), ended


@whole
@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_that_was_killed_ends_the_others(tmp_path: Path, killed: int) -> None:
    with pods(tmp_path, "ranks.py", "hangs", "hangs") as run:
        until((tmp_path / f"began{1 - killed}").exists, "the other rank runs")
        run[killed].process.send_signal(signal.SIGKILL)
        status, _, errors = run[1 - killed].end(peers.SILENCE + 60)
        shutil.rmtree(tmp_path / "tmp")  # the killed one's
    says = "the first host's launcher cannot be reached" if killed == 0 else "host 1 of 2, "
    assert status == 1 and f"error: every rank here was ended, too: {says}" in errors, errors
