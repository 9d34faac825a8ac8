"""Processes that begin as forks of one that has imported what they need (pool.PRELOAD): the command
`polyreme`, and under it its ranks. Importing that takes a process longer than all else that a test has it do.

From there on they are what they would be otherwise: processes of their own, in sessions of their own, with
their variables, signals, files and ends. What happens as an interpreter starts needs a real one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver as servers
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from polyreme.compat import finder
from polyreme.launch import local
from pool import PRELOAD, forkserver

DOOR_PRELOAD = ["polyreme.compat.deepspeed", "transformers.trainer_seq2seq", "peft", *PRELOAD]
_PR_SET_NAME = 15
NAME = "rank-"  # of a rank's process, before its number


class WarmPython:
    """`python WORDS` (-m MODULE ARGUMENTS or -c CODE) in `folder` with these variables and no others; of
    subprocess.Popen what tests use.

    `ranks`: it starts ranks as forks of itself, too. `door`: all of them begin with DeepSpeed's
    door open. What all of them print goes to `output` and `errors`, files beside `folder`."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        ranks: bool = False,
        door: bool = False,
    ) -> None:
        printed = Path(tempfile.mkdtemp(prefix="printed-", dir=folder.parent))
        self.output, self.errors = printed / "output", printed / "errors"
        self._process = forkserver().Process(
            target=_python, args=(list(words), folder, dict(variables), self.output, self.errors, ranks)
        )
        with _behind_the_door() if door else contextlib.nullcontext():
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, at its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("python", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What was printed, at its end. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.output.read_text(), self.errors.read_text()


_DOOR = servers.ForkServer()
"""Opens the door as it starts, before it imports anything that looks for DeepSpeed."""
_DOOR.set_forkserver_preload(DOOR_PRELOAD)


@contextlib.contextmanager
def _behind_the_door() -> Iterator[None]:
    """Have processes that are started meanwhile begin as forks of `_DOOR`."""
    with (
        patch.object(servers, "connect_to_new_process", _DOOR.connect_to_new_process),
        patch.dict(os.environ, {**finder.variables("deepspeed"), "HF_HUB_OFFLINE": "1"}),
    ):
        yield


class WarmRank:
    """A rank as a fork of its launcher; of subprocess.Popen what that one uses."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        _flush()
        self.pid = os.fork()
        if not self.pid:
            for number, descriptor in ((1, stdout), (2, stderr)):
                if descriptor is not None:
                    os.dup2(descriptor, number)
            _rank(args, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _python(
    words: list[str], folder: Path, variables: Mapping[str, str], output: Path, errors: Path, ranks: bool
) -> NoReturn:
    os.setsid()
    for number, path in ((1, output), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    if ranks:
        local.Popen = WarmRank  # type: ignore[assignment, misc]
    gc.freeze()  # never to visit what is imported makes each collection quick
    option, what, *sys.argv[1:] = words
    if option == "-m":
        _live(lambda: runpy.run_module(what, run_name="__main__", alter_sys=True), variables)
    assert option == "-c"
    _live(lambda: exec(what, {"__name__": "__main__"}), variables)


def _rank(args: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Be `python -m polyreme.launch.rank ARGUMENTS`."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{NAME}{variables['RANK']}".encode())
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the launcher's, of its folder
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from polyreme.launch.rank import main

    program, module, name, *arguments = args
    assert (program, module, name) == (sys.executable, "-m", "polyreme.launch.rank")
    _live(lambda: main(arguments), variables)


def _live(main: Callable[[], object], variables: Mapping[str, str]) -> NoReturn:
    """Be a process that runs `main` and ends."""
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    sys.path.insert(0, str(Path.cwd()))
    status: object = 1
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(status if isinstance(status, int) else 1)


def _flush() -> None:
    for stream in sys.stdout, sys.stderr:
        stream.flush()
