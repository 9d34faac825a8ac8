"""Ranks that another launcher's command starts (mpirun, srun): ends them through the command, and shows their
output.

Invariants: a command that was closed has ended, and none outlives this process. Where a rank has reported a
failure, the command has `grace` seconds to end the others: mpirun has no deadline where a host does not
answer.
Communication: none of ours, but reports of ranks that end, in the stream that they write to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from polyreme.launch.options import RanksFailedError
from polyreme.launch.processes import die_with_parent
from polyreme.launch.requests import ENDS, STOPPED
from polyreme.launch.supervise import SupervisedRun, Transport, going_on

_WORD = re.compile(ENDS.format(r"(\d+)", "([^\0]*)").encode())
_BEGINS = ENDS.partition("{")[0].encode()
LONGEST = 8192  # most bytes of a report


class Command(Transport):
    """A command that starts ranks: its `words`, variables to add, and the `name` for messages.

    Ctrl-C ends it as SIGTERM does, unless it `interrupts` its ranks itself. Requests to save reach it as
    SIGUSR1, and where it `saves`, ranks that end with STOPPED are to go on. It has failed where it ends with
    a status other than 0, or by a signal, or before `ranks` ranks have reported their end."""

    grace = 5.0

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        *,
        ranks: int = 0,
        saves: bool = False,
        interrupts: bool = True,
    ) -> None:
        self._name, self._words, self._variables = name, words, variables
        self._ranks, self._saves, self._interrupts = ranks, saves, interrupts
        self._reports: list[tuple[int, str]] = []  # exit status and failure of each ended rank
        self._process: subprocess.Popen[bytes] | None = None
        self._hung = False

    def start(self, run: SupervisedRun) -> None:
        self._process = subprocess.Popen(
            self._words, env={**os.environ, **self._variables}, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        self._relay = threading.Thread(target=_relay, args=(self._process, self._reports), daemon=True)
        self._relay.start()

    def look(self) -> bool:
        assert self._process is not None
        time.sleep(0.05)
        return self._process.poll() is not None

    def failing(self) -> bool:
        return any(status not in (0, STOPPED) for status, _ in self._reports)

    def save(self, number: int) -> bool:
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        return True

    def end(self, number: int | None) -> None:
        assert self._process is not None
        interrupts = number == signal.SIGINT and self._interrupts
        self._process.send_signal(signal.SIGINT if interrupts else signal.SIGTERM)

    def close(self, within: float) -> None:
        if self._process is None:
            return
        self._hung = self._process.poll() is None
        if self._hung:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._relay.join(1.0)  # what the command left behind may hold the pipe

    def stopped(self) -> str:
        return f"{self._name} has ended"

    def failure(self, save_signal: signal.Signals | None) -> RanksFailedError | None:
        assert self._process is not None
        code = self._process.returncode
        failed = [each for each in self._reports if each[0] not in (0, STOPPED)]
        stops = any(status == STOPPED for status, _ in self._reports)
        kept = code == 0 and stops and len(self._reports) == self._ranks  # MPICH 4.0.2 can lose the status
        if self._saves and not failed and (code == STOPPED or kept):
            return going_on()
        missing = self._ranks - len(self._reports)
        if not code and not failed and missing <= 0:
            return None
        how = f"ended with status {code}"
        if self._hung:
            seconds = self.grace + self.leaving
            how = f"did not end the others within {seconds:g} s after one had failed, and was killed"
        elif not code and not failed:  # Open MPI 5 where a host was killed
            how += f" before {missing} of {self._ranks} ranks had ended, whose hosts it has lost"
        said = next((report for _, report in failed if report), "see what ranks print above")
        status = failed[0][0] if failed else code if 0 < code < 128 else 1
        return RanksFailedError(f"{self._name} {how}: {said}", status)


def _relay(process: subprocess.Popen[bytes], reports: list[tuple[int, str]]) -> None:
    """Show what the command writes to stderr, and take the reports of ranks that end out of it."""
    assert process.stderr is not None
    held = b""
    while data := os.read(process.stderr.fileno(), 65536):
        held += data
        reports += [(int(status), _report(said)) for status, said in _WORD.findall(held)]
        held = _WORD.sub(b"", held)
        begun = held.rfind(b"\0", -LONGEST)  # an incomplete report
        if begun >= 0 and not held.startswith(_BEGINS[: len(held) - begun], begun):
            begun = -1
        shown, held = (held, b"") if begun < 0 else (held[:begun], held[begun:])
        _show(shown)
    _show(held)


def _report(said: bytes) -> str:
    """Return the text of a rank's report; empty where other output has torn it apart."""
    try:
        return str(json.loads(said))
    except ValueError:
        return ""


def _show(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads on
        while data:
            data = data[os.write(2, data) :]
