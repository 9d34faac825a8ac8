"""Wait for the end of a run, wherever its ranks are: which signal asks ranks to save and which one ends the
run, when ranks are ended because others have failed, and with which error and exit status.

A `Transport` reaches the ranks and reports their end. Invariant: when its `run` returns or raises, it has
been closed. Communication: none."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from polyreme.launch.options import SAVING, RanksFailedError
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import ENDINGS, Heard, SaveRequests, hearing

LEAVING = 12.0  # seconds for ranks elsewhere that are to end at once


class Transport(Protocol):
    """The connection to the ranks of a run: starts, signals and ends them."""

    grace: float = 0.0
    """Seconds after the first failure in which other ranks may fail, or end, by themselves."""
    leaving: float = LEAVING
    """Seconds for ranks to end after they were told to."""
    saving: float = SAVING
    """Seconds for ranks to save after they were asked to."""
    restarts: bool = False
    """True if ranks may begin again after they saved, and so be asked again."""

    def start(self, run: SupervisedRun) -> None:
        """Start the ranks. Long waits go within `run.interruptible`."""

    def look(self) -> bool:
        """Wait a moment and process what has happened. Returns whether all ranks have ended."""

    def failing(self) -> bool:
        """Return whether a rank has failed."""
        return False

    def save(self, number: int) -> bool:
        """Ask the ranks to save and end. Returns whether there are any that can hear it."""

    def end(self, number: int | None) -> None:
        """End all ranks at once, by a signal, or (None) because one has failed."""

    def close(self, within: float) -> None:
        """Leave nothing behind, waiting at most `within` seconds for what is about to end."""

    def stopped(self) -> str:
        """Describe the end of a run that a signal has ended. Called once it is closed."""

    def failure(self, save_signal: signal.Signals | None) -> RanksFailedError | None:
        """Return the error of a run that has failed. Called once it is closed. `save_signal`: the signal by
        which ranks were asked to save."""

    def agree(self, error: RanksFailedError | None) -> RanksFailedError | None:
        """Return the error of the whole run, where other hosts take part in it."""
        return error

    def run(self, save_signals: Collection[int] = ()) -> signal.Signals | None:
        """Start the ranks, and wait for their end.

        The signals in `save_signals` are passed on once, as the request to save; `SaveRequests` decides which
        further ones end the run. Any other signal of ENDINGS ends it, and a second one at once. Returns the
        signal at which the ranks saved and ended well. Raises RanksFailedError where the run ends otherwise,
        or by a signal."""
        with hearing(ENDINGS) as came:
            run = SupervisedRun(self, save_signals, came)
            try:
                self.start(run)
                run.wait()
            finally:
                self.close(run.left())
            error = self.failure(run.save_requests.first) if run.number is None else run.stopped()
            if error := self.agree(error):
                raise error
            return run.save_requests.first


def stopped_by(number: int, how: str) -> RanksFailedError:
    """Return the error of a run that a signal has ended; `how` says what became of its ranks."""
    return RanksFailedError(f"stopped by {signal.Signals(number).name}; {how}", 128 + number)


def going_on(how: str = "") -> RanksFailedError:
    """Return the error of a run whose ranks saved and ended, to be started again."""
    return RanksFailedError(f"ranks have stopped{how}, and are to go on (status {STOPPED})", STOPPED)


class SupervisedRun:
    """One run under supervision: the signals that came, and the deadlines for its ranks, in seconds of the
    monotonic clock."""

    def __init__(self, transport: Transport, asking: Collection[int], came: Heard) -> None:
        self._transport, self._asking, self._came = transport, asking, came
        self.number: int | None = None
        """The signal that ends the run."""
        self.save_requests = SaveRequests()
        self._late = False  # whether ranks have not saved in time
        self._failed, self._asked, self._deadline = math.inf, math.inf, math.inf

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise RanksFailedError at once for a signal that has come or comes within the block."""
        self._check()
        self._came.then = self._check
        try:
            yield
        finally:
            self._came.then = None

    def ask(self, number: int) -> None:
        """Ask ranks to save, once, as if the signal `number` had come."""
        if self.save_requests.first is None:
            self._came.append(number)

    def wait(self) -> None:
        """Return when all ranks have ended, or their time is up."""
        while True:
            ended = self._transport.look()
            while self._came:  # the ranks may have ended by the same signal
                self._heed(self._came.pop(0))
            if ended:
                return
            now = time.monotonic()
            if self._failed == math.inf and self._transport.failing():
                self._failed = now
            if now >= self._failed + self._transport.grace and self._deadline == math.inf:
                self._end(None)
            if now > self._asked + self._transport.saving and self._deadline == math.inf:
                self.number, self._late, self._deadline = self.save_requests.first, True, now
            if now >= self._deadline:
                return

    def left(self) -> float:
        """Return the seconds left for what is about to end."""
        return max(min(self._deadline - time.monotonic(), self._transport.leaving), 0.0)

    def stopped(self) -> RanksFailedError:
        """Return the error of a run that a signal has ended."""
        assert self.number is not None
        how = self._transport.stopped()
        if self._late:
            how = f"its ranks had not saved and ended {self._transport.saving:g} s later, and were killed"
        return stopped_by(self.number, how)

    def _check(self) -> None:
        if self._came:
            self.number = self._came[0]
            raise self.stopped()

    def _heed(self, number: int) -> None:
        now, asked = time.monotonic(), self._asked < math.inf
        if self.number is not None:
            self._deadline = now
        elif (
            number in self._asking
            and not self.save_requests.again(number)
            and (((not asked or self._transport.restarts) and self._transport.save(number)) or asked)
        ):
            self._asked = min(self._asked, now)
        else:
            self.number = number
            self._end(number)

    def _end(self, number: int | None) -> None:
        self._deadline = time.monotonic() + self._transport.leaving
        self._transport.end(number)
