"""Runs another launcher's command (mpirun, srun), passes signals on to it, and waits for its end.

Invariants: when `supervise` returns or raises, the command has ended, which does not outlive this process
either. Where a rank has told that it failed, the command has GRACE seconds to end the others: mpirun has no
deadline where a host does not answer.
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
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from polyreme.launch.manner import RanksFailedError
from polyreme.launch.processes import die_with_parent
from polyreme.launch.requests import ENDS, STOPPED
from polyreme.launch.signals import ENDINGS, WISHES, Wishes, hearing

LEAVING = 12.0  # seconds for the command to end its ranks
Told = tuple[int, str]
"""The status with which a rank ends, and what it said of its failure."""
GRACE = 5.0  # seconds after the first rank failed in which it ends by itself
_WORD = re.compile(ENDS.format(r"(\d+)", "([^\0]*)").encode())
_BEGINS = ENDS.partition("{")[0].encode()
LONGEST = 8192  # bytes of such a word


def supervise(
    name: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    saves: bool = False,
    interrupts: bool = True,
    ranks: int = 0,
    interrupt_saves: bool = False,
) -> signal.Signals | None:
    """Run the command `words` with these variables more, and wait for its end.

    Signals that end a command end it, Ctrl-C as SIGTERM unless it `interrupts` its ranks itself; of a run
    that `saves`, SIGTERM and SIGUSR1 (if `interrupt_saves` Ctrl-C as well) become SIGUSR1, which is passed on
    to ranks; those that then end with STOPPED are to go on. Returns the signal of such a wish. Raises
    RanksFailedError where it ends with a status other than 0, or by a signal, or before so many `ranks` have
    told that they ended; messages call it `name`."""
    asking = (*WISHES, *([signal.SIGINT] if interrupt_saves else [])) if saves else ()
    wishes = Wishes()
    with hearing({*ENDINGS, *asking}) as came:
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        told: list[Told] = []
        relay = threading.Thread(target=_relay, args=(process, told), daemon=True)
        relay.start()
        try:
            stopped = _wait(process, came, told, interrupts, asking, wishes)
        finally:
            if hung := process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            relay.join(1.0)  # what the command left behind may hold the pipe
    if stopped is not None:
        raise RanksFailedError(f"stopped by {signal.Signals(stopped).name}; {name} has ended", 128 + stopped)
    failed = [each for each in told if each[0] not in (0, STOPPED)]
    stops = any(status == STOPPED for status, _ in told)
    kept = process.returncode == 0 and stops and len(told) == ranks  # MPICH 4.0.2 can lose it
    if saves and not failed and (process.returncode == STOPPED or kept):
        raise RanksFailedError(f"ranks have stopped, and are to go on (status {STOPPED})", STOPPED)
    if process.returncode or failed or len(told) < ranks:
        status = process.returncode if 0 < process.returncode < 128 else 1
        how = f"ended with status {process.returncode}"
        if hung:
            how = f"did not end the others within {GRACE + LEAVING:g} s after one had failed, and was killed"
        elif not process.returncode and not failed:  # Open MPI 5 where a host was killed
            how += f" before {ranks - len(told)} of {ranks} ranks had ended, whose hosts it has lost"
        said = next((report for _, report in failed if report), "see what ranks print above")
        raise RanksFailedError(f"{name} {how}: {said}", failed[0][0] if failed else status)
    return wishes.first


def _relay(process: subprocess.Popen[bytes], told: list[Told]) -> None:
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


def _wait(
    process: subprocess.Popen[bytes],
    came: list[int],
    told: list[Told],
    interrupts: bool,
    asking: Collection[int],
    wishes: Wishes,
) -> int | None:
    """Until it has ended; returns the signal that ended it before its time. `asking`: those by which its
    ranks are asked to save."""
    stopped, deadline, grace = None, float("inf"), float("inf")
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(status not in (0, STOPPED) for status, _ in told) and grace == float("inf"):
            grace = time.monotonic() + GRACE
        if time.monotonic() > grace and deadline == float("inf"):
            deadline = time.monotonic() + LEAVING
            process.send_signal(signal.SIGTERM)
        while came:
            number, now = came.pop(0), time.monotonic()
            asked = wishes.first is not None
            if number in asking and not wishes.again(number):
                if not asked:
                    process.send_signal(signal.SIGUSR1)
            else:
                deadline = now + LEAVING if stopped is None else now
                stopped = stopped or number
                process.send_signal(
                    signal.SIGINT if number == signal.SIGINT and interrupts else signal.SIGTERM
                )
    return stopped
