"""Ctrl-C while modules are imported ends the process without a traceback; requests to stop are heard at once,
whatever the process does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from polyreme.cli import doctor
from polyreme.distributed import rendezvous
from polyreme.distributed.environment import Environment
from polyreme.errors import PolyremeError
from polyreme.launch import local, mpirun, several, signals, torchrun
from polyreme.launch.hosts import Hosts
from polyreme.launch.rank import LAUNCHER_TIMEOUT
from polyreme.launch.signals import importing
from polyreme.launch.supervise import stopped_by


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

    def start(*words: object, **options: object) -> None:
        found.append(signal.pthread_sigmask(signal.SIG_BLOCK, set()))
        raise PolyremeError

    monkeypatch.setattr(local, "Popen", start)
    with pytest.raises(PolyremeError):
        torchrun.launch(["-m", "this"], 1)
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
        assert rank.wait(LAUNCHER_TIMEOUT / 2) == 130


def test_doctor_that_is_interrupted_is_no_check_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise stopped_by(signal.SIGINT, "every rank has ended")

    monkeypatch.setattr(torchrun, "launch", interrupted)
    with pytest.raises(torchrun.RanksFailedError) as caught:
        doctor._ranks()
    assert caught.value.exit_status == 130


BUSY = """
import hashlib
from polyreme.launch import signals
signals.ONE_PRESS = signals.ONE_SIGNAL = 0.0
with signals.listening(lambda number: None, aloud=True, last_words=lambda: "what is next"):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, in which no handler of Python's runs
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_slow_step_is_acknowledged_at_once(
    first: signal.Signals, second: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as busy:
        assert busy.stdout is not None and busy.stderr is not None and busy.stdout.readline() == "ready\n"
        busy.send_signal(first)
        again = "again" if first == signal.SIGINT else "Ctrl-C"
        said = f"{first.name}: ending after the step under way, which is saved; {again} to end at once\n"
        assert busy.stderr.readline() == said
        if second == signal.SIGTERM != first:  # the first of its kind, which ends nothing: the next one does
            busy.send_signal(signal.SIGTERM)
            busy.send_signal(signal.SIGINT)
            second = signal.SIGINT
        else:
            busy.send_signal(second)
        assert busy.wait(LAUNCHER_TIMEOUT) == 128 + second
        assert busy.stderr.read() == f"ended by {second.name}\nwhat is next\n"


def test_which_wish_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    for sent, ends in (
        ([(0, INT), (0.1, INT), (0.4, INT), (0.6, INT)], 3),
        ([(0, TERM), (0.1, TERM), (1.9, TERM), (2.1, TERM)], 3),
        ([(0, USR1), (9, USR1), (99, TERM), (99.1, TERM)], None),
        ([(0, TERM), (0.1, INT), (0.6, INT)], 2),
        ([(0, INT), (5, TERM), (6, TERM)], None),
    ):
        requests = signals.SaveRequests()
        found = None
        for at, (now[0], number) in enumerate(sent):
            if requests.again(number) and found is None:
                found = at
        assert found == ends and requests.first == sent[0][1], sent


def test_afterwards_the_signals_are_what_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    told: list[int] = []
    with signals.listening(told.append):
        signal.raise_signal(signal.SIGINT)
    assert told == [signal.SIGINT] and signal.set_wakeup_fd(wakeup) == wakeup
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_launcher_sees_whether_a_rank_would_save() -> None:
    """It promises so to whoever sends a signal."""
    assert not signals.listens(os.getpid())
    with signals.listening(lambda _: None):
        assert signals.listens(os.getpid())
    assert not signals.listens(os.getpid())


SAVED = """
import os, signal, sys

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGUSR1):
        kill(process, number)  # when the interpreter has reset all handlers

sys.late = Late()
{saves}
sys.exit(75)
"""
HANDLED = "signal.signal(signal.SIGUSR1, lambda *_: None)"
LISTENED = """
from polyreme.launch import signals
with signals.listening(lambda _: None):
    signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(("saves", "status"), [(HANDLED, 75), (LISTENED, 75), ("", -signal.SIGUSR1)])
def test_a_copy_of_the_request_does_not_kill_a_rank_that_has_saved(
    tmp_path: Path, saves: str, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAVED.format(saves=saves))
    command = [sys.executable, "-m", "polyreme.launch.rank", str(os.getpid()), "--saves", str(script)]
    assert subprocess.run(command, check=False).returncode == status


def test_ctrl_c_while_a_rank_ends_leaves_no_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "polyreme.launch.rank", str(os.getpid()), str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ctrl-C comes while a name is looked up, and no name server answers: the look-up waits in C, where no
    handler of Python's runs. Has the names whose look-up has ended."""
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # all zero: an open mutex
    library.pthread_mutex_lock(lock)
    within = (ctypes.c_long * 2)(int(time.time()) + 10, 0)
    ended: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()  # once it waits
        try:
            library.pthread_mutex_timedlock(lock, within)
        finally:
            ended.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(rendezvous, "announce", lambda *_: None)
    yield ended
    library.pthread_mutex_unlock(lock)


def meets() -> None:
    rendezvous.meet(Environment("a test", 1, 2, 1, 2, ("far", 1)), timedelta(seconds=99))


LOOK_UPS: dict[str, Callable[[], object]] = {
    "a hostfile": lambda: several.run({"far": [0]}, several.RankCommand(["x"]), ssh=["false"]),
    "a hostfile of mpirun": lambda: mpirun.run(
        mpirun.Library("/none", mpirun.HYDRA), mpirun.Request(["x"], {"far": 1}, {}, ["nossh"])
    ),
    "the first launcher": lambda: torchrun.launch(["-m", "x"], 1, hosts=Hosts(0, 2, 2, ("far", 1))),
    "another launcher": lambda: torchrun.launch(["-m", "x"], 1, hosts=Hosts(1, 2, 2, ("far", 1))),
    "a rank": meets,
}


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex with a deadline is Linux's")
@pytest.mark.parametrize("what", LOOK_UPS)
def test_ctrl_c_ends_what_waits_for_a_name_server(what: str, mute: list[str]) -> None:
    with pytest.raises((KeyboardInterrupt, PolyremeError), match=r"^$|^stopped by SIGINT"):
        LOOK_UPS[what]()
    assert not mute
