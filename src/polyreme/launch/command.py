"""Ranks that another launcher's command starts (mpirun, srun): it has them end, and shows what they print.

Invariants: a command that was closed has ended, and none outlives this process.
Where a rank has told that it failed, the command has `grace` to end the others: mpirun has no deadline where
a host does not answer.
Communication: none of ours, but words of ranks that end among what they write to stderr."""

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

from polyreme.launch.manner import RanksFailedError
from polyreme.launch.processes import die_with_parent
from polyreme.launch.requests import ENDS, STOPPED
from polyreme.launch.supervise import Run, Transport, going_on

_WORD = re.compile(ENDS.format(r"(\d+)", "([^\0]*)").encode())
_BEGINS = ENDS.partition("{")[0].encode()
LONGEST = 8192  # bytes of such a word


class Command(Transport):
    """The command `words`, with these variables more, which messages call `name`.

    Ctrl-C ends it as SIGTERM unless it `interrupts` its ranks itself; wishes to save go to it as SIGUSR1,
    and where it `saves`, ranks that end with STOPPED are to go on. It has failed where it ends with a status
    other than 0, or by a signal, or before so many `ranks` have told that they ended."""

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
        self._told: list[tuple[int, str]] = []  # the status with which each rank ended, and of its failure
        self._process: subprocess.Popen[bytes] | None = None
        self._hung = False

    def start(self, run: Run) -> None:
        self._process = subprocess.Popen(
            self._words, env={**os.environ, **self._variables}, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        self._relay = threading.Thread(target=_relay, args=(self._process, self._told), daemon=True)
        self._relay.start()

    def look(self) -> bool:
        assert self._process is not None
        time.sleep(0.05)
        return self._process.poll() is not None

    def failing(self) -> bool:
        return any(status not in (0, STOPPED) for status, _ in self._told)

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

    def failure(self, wish: signal.Signals | None) -> RanksFailedError | None:
        assert self._process is not None
        code = self._process.returncode
        failed = [each for each in self._told if each[0] not in (0, STOPPED)]
        stops = any(status == STOPPED for status, _ in self._told)
        kept = code == 0 and stops and len(self._told) == self._ranks  # MPICH 4.0.2 can lose it
        if self._saves and not failed and (code == STOPPED or kept):
            return going_on()
        missing = self._ranks - len(self._told)
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


def _relay(process: subprocess.Popen[bytes], told: list[tuple[int, str]]) -> None:
    """Show what comes on the command's stderr, and take the words of ranks that end out of it."""
    assert process.stderr is not None
    held = b""
    while data := os.read(process.stderr.fileno(), 65536):
        held += data
        told += [(int(status), _report(said)) for status, said in _WORD.findall(held)]
        held = _WORD.sub(b"", held)
        begun = held.rfind(b"\0", -LONGEST)  # a word that has not come whole
        if begun >= 0 and not held.startswith(_BEGINS[: len(held) - begun], begun):
            begun = -1
        shown, held = (held, b"") if begun < 0 else (held[:begun], held[begun:])
        _show(shown)
    _show(held)


def _report(said: bytes) -> str:
    """What a rank said of its failure, of which other output may have torn the middle."""
    try:
        return str(json.loads(said))
    except ValueError:
        return ""


def _show(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads on
        while data:
            data = data[os.write(2, data) :]
