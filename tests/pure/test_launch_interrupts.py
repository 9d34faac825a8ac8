"""Ctrl-C while modules are imported ends the process without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from polyreme.cli import doctor
from polyreme.launch import torchrun
from polyreme.launch.rank import AGENT_TIMEOUT
from polyreme.launch.signals import importing


def status_of_child() -> int:
    """How a forked process ends that gets SIGINT in an import that swallows what it raises."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with importing():
                os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            os._exit(0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_import_that_swallows_it_ends_nevertheless() -> None:
    assert status_of_child() == 130


def test_a_handler_of_the_users_handler_stays() -> None:
    before, told = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        with importing():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT]


def test_ranks_begin_with_it_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[Any]] = []

    def start(self: object, group: object) -> dict[int, Any]:
        found.append(signal.pthread_sigmask(signal.SIG_BLOCK, set()))
        return {}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start)
    agent = torchrun._Agent.__new__(torchrun._Agent)
    agent.manner, agent.saves = torchrun.Manner(), False
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=0)])
    agent._start_workers(group)  # type: ignore[arg-type]
    assert signal.SIGINT in found[0] and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_a_rank_that_was_interrupted_ends_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\ntry:\n    print('begun')\n    "
        "time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    variables = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}
    command = [sys.executable, "-m", "polyreme.launch.rank", str(os.getpid()), str(script)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"begun\n"
        rank.send_signal(signal.SIGINT)
        assert rank.wait(AGENT_TIMEOUT / 2) == 130


def test_doctor_that_is_interrupted_is_no_check_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise torchrun._stopped_by(signal.SIGINT)

    monkeypatch.setattr(torchrun, "launch", interrupted)
    with pytest.raises(torchrun.RanksFailedError) as caught:
        doctor._ranks()
    assert caught.value.exit_status == 130
