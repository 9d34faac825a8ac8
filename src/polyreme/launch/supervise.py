"""Runs another launcher's command (mpirun, srun), passes signals on to it, and waits for its end.

Invariant: when `supervise` returns or raises, the command has ended. Communication: none of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import ENDINGS, WISHES, hearing
from polyreme.launch.torchrun import ONE_SIGNAL, RanksFailedError

LEAVING = 12.0  # seconds for the command to end its ranks


def supervise(
    name: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    saves: bool = False,
    interrupts: bool = True,
) -> None:
    """Run the command `words` with these variables more, and wait for its end.

    Signals that end a command end it, Ctrl-C as SIGTERM unless it `interrupts` its ranks itself; of a run
    that `saves`, SIGTERM and SIGUSR1 become SIGUSR1, which is passed on to ranks; those that then end with
    STOPPED are to go on. Raises RanksFailedError where it ends with a status other than 0, or by a signal;
    messages call it `name`."""
    with hearing({*ENDINGS, *(WISHES if saves else ())}) as came:
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            stopped = _wait(process, came, saves, interrupts)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if stopped is not None:
        raise RanksFailedError(f"stopped by {signal.Signals(stopped).name}; {name} has ended", 128 + stopped)
    if saves and process.returncode == STOPPED:
        raise RanksFailedError(f"ranks have stopped, and are to go on (status {STOPPED})", STOPPED)
    if process.returncode:
        status = process.returncode if 0 < process.returncode < 128 else 1
        raise RanksFailedError(
            f"{name} ended with status {process.returncode}: see what ranks print above", status
        )


def _wait(process: subprocess.Popen[bytes], came: list[int], saves: bool, interrupts: bool) -> int | None:
    """Until it has ended; returns the signal that ended it before its time."""
    stopped, asked_at, deadline = None, 0.0, float("inf")
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        while came:
            number, now = came.pop(0), time.monotonic()
            if saves and number in WISHES and not asked_at:
                asked_at = now
                process.send_signal(signal.SIGUSR1)
            elif not (
                saves and number in WISHES and (number == signal.SIGUSR1 or now < asked_at + ONE_SIGNAL)
            ):
                deadline = now + LEAVING if stopped is None else now
                stopped = stopped or number
                process.send_signal(
                    signal.SIGINT if number == signal.SIGINT and interrupts else signal.SIGTERM
                )
    return stopped
