"""The ranks of one host, in the place of whose processes stand others."""

from __future__ import annotations

import signal
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from polyreme.errors import LaunchError
from polyreme.launch import local
from polyreme.launch.hosts import Place
from polyreme.launch.local import Local
from polyreme.launch.options import PLAIN, LaunchOptions, RanksFailedError
from polyreme.launch.signals import Heard
from polyreme.launch.supervise import SupervisedRun


class Others:
    """Launchers of other hosts, in the place of `Peers`."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def fail(self, text: str, status: int = 1) -> None:
        self.told.append(text)

    def failure(self, within: float = 0.0) -> None: ...

    def elsewhere(self) -> None: ...

    def close(self) -> None:
        self.told.append("closed")


class Process:
    """One that does not end."""

    pid, returncode = 1 << 30, None  # of no process

    def __init__(self, words: Any, env: dict[str, str], **_: Any) -> None:
        self.variables = env

    def poll(self) -> None: ...

    def wait(self, timeout: float) -> None:
        raise TimeoutExpired("rank", timeout)


def of_one_rank(tmp_path: Path, options: LaunchOptions = PLAIN, others: Any = None) -> Local:
    place = Place(0, 2, 0, 4, None, ("127.0.0.1", 1), "run", others)  # type: ignore[arg-type]
    return Local([["script.py"]], options.variables, tmp_path, lambda _: place, options, (), None)


def begun(tmp_path: Path, *given: Any) -> Local:
    ranks = of_one_rank(tmp_path, *given)
    ranks.start(SupervisedRun(ranks, (), Heard()))
    return ranks


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Popen", Process)


def test_other_hosts_hear_of_ranks_that_cannot_be_started(tmp_path: Path, processes: None) -> None:
    others = Others()
    with pytest.raises(LaunchError, match="cannot be written to"):
        begun(tmp_path, LaunchOptions(log="/dev/null/rank"), others)
    assert "cannot be written to" in str(others.told[0]) and others.told[1:] == ["closed"]


def test_a_rank_that_the_kernel_does_not_let_go_of_holds_nobody(tmp_path: Path, processes: None) -> None:
    ranks = begun(tmp_path)
    ranks.close(0.0)
    failure = ranks.failure(None)
    assert failure is not None and "rank 0 of 4 failed first: it was ended by SIGKILL" in str(failure)
    assert failure.exit_status not in (0, 128 + signal.SIGKILL)


@pytest.mark.parametrize(("given", "found"), [({}, "1"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3")])
def test_what_the_launch_options_say_of_nccl_counts(
    given: dict[str, str], found: str, tmp_path: Path, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    (process,) = begun(tmp_path, LaunchOptions(variables=given))._processes
    assert process.variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == found  # type: ignore[attr-defined]


def test_what_takes_less_memory_is_told_on_every_host(tmp_path: Path, processes: None) -> None:
    others = Others()
    error = RanksFailedError("rank 0 of 4 failed first", 1, 0)
    error.out_of_memory = True
    found = begun(tmp_path, PLAIN, others).agree(error)
    assert found is not None and found.out_of_memory and found.rank == 0
    assert others.told == ["rank 0 of 4 failed first", "closed"]
