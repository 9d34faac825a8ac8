"""Processes that begin as forks of one that has imported what they need (pool.PRELOAD): the command
`polyreme`, and under it its ranks. Importing that takes a process longer than all else that a test has it do.

From there on they are what they would be otherwise: processes of their own, in sessions of their own, with
their variables, signals, files and ends. What happens as an interpreter starts needs a real one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from pool import forkserver

_PR_SET_NAME = 15
NAME = "rank-"  # of a rank's process, before its number


class WarmCommand:
    """`polyreme WORDS` in `folder` with these variables and no others; of subprocess.Popen what tests use.

    What it and its ranks print goes to `output` and `errors`, files."""

    def __init__(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str], output: Path, errors: Path
    ) -> None:
        self._files = output, errors
        for path in self._files:
            path.touch()
        self._process = forkserver().Process(
            target=_command, args=(list(words), folder, dict(variables), output, errors)
        )
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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What was printed, at its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.poll() is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("polyreme", timeout)
        output, errors = (path.read_text() for path in self._files)
        return output, errors


class WarmRank:
    """A rank as a fork of its launcher; of subprocess.Popen what torchrun's agent uses, and ours of it."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        _flush()
        self.pid = os.fork()
        if not self.pid:
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


def _command(
    words: list[str], folder: Path, variables: Mapping[str, str], output: Path, errors: Path
) -> NoReturn:
    os.setsid()
    for number, path in ((1, output), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    subprocess_handler.Popen = WarmRank  # type: ignore[assignment, misc]
    sys.argv = ["polyreme", *words]
    _live(lambda: runpy.run_module("polyreme", run_name="__main__", alter_sys=True), variables)


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
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(status if isinstance(status, int) else 1)


def _flush() -> None:
    for stream in sys.stdout, sys.stderr:
        stream.flush()
