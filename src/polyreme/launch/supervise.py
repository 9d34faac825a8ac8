"""Waits for the end of a run, wherever its ranks are: which signal is a wish to save and which one ends the
run, when ranks are ended because others have failed, and with which error and exit status.

A `Transport` reaches the ranks and knows what became of them. Invariant: when its `run` returns or raises, it
has been closed. Communication: none."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from polyreme.launch.manner import SAVING, RanksFailedError
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import ENDINGS, Heard, Wishes, hearing

LEAVING = 12.0  # seconds for ranks elsewhere that are to end at once


class Transport(Protocol):
    """The way to the ranks of a run."""

    grace: float = 0.0
    """Seconds after the first failure in which others fail, or end, by themselves."""
    leaving: float = LEAVING
    """Seconds for ranks that are to end."""
    saving: float = SAVING
    """Seconds for ranks that were asked to save."""

    def start(self, run: Run) -> None:
        """Start the ranks; what waits does so where the run is `interruptible`."""

    def look(self) -> bool:
        """Take what has come, after a moment. Returns whether all has ended."""

    def failing(self) -> bool:
        """Whether a rank has failed."""
        return False

    def save(self, number: int) -> bool:
        """Have ranks save and end. Returns whether there are any to hear it."""

    def end(self, number: int | None) -> None:
        """Have all ranks end at once, by a signal, or (None) as one has failed."""

    def close(self, within: float) -> None:
        """Leave nothing behind, after so many seconds at most for what is about to end."""

    def stopped(self) -> str:
        """What became of the ranks of a run that a signal has ended, in words, once it is closed."""

    def failure(self, wish: signal.Signals | None) -> RanksFailedError | None:
        """How the run has failed, if it has, once it is closed. `wish`: by which ranks were asked to save."""

    def agree(self, error: RanksFailedError | None) -> RanksFailedError | None:
        """How the run has failed, where others than this process have a say in it."""
        return error

    def run(self, wishes: Collection[int] = ()) -> signal.Signals | None:
        """Start the ranks, and wait for their end.

        The signals in `wishes` are passed on once, as the wish to save; `Wishes` says which ones of them end
        the run. Any other signal of ENDINGS ends it, and a second one at once. Returns the wish by which the
        ranks ended well. Raises RanksFailedError where the run ends otherwise, or by a signal."""
        with hearing(ENDINGS) as came:
            run = Run(self, wishes, came)
            try:
                self.start(run)
                run.wait()
            finally:
                self.close(run.left())
            error = self.failure(run.wishes.first) if run.number is None else run.stopped()
            if error := self.agree(error):
                raise error
            return run.wishes.first


def stopped_by(number: int, how: str) -> RanksFailedError:
    """The error of a run that a signal has ended, and `how`."""
    return RanksFailedError(f"stopped by {signal.Signals(number).name}; {how}", 128 + number)


def going_on(how: str = "") -> RanksFailedError:
    """The error of a run whose ranks saved and ended, to be started again."""
    return RanksFailedError(f"ranks have stopped{how}, and are to go on (status {STOPPED})", STOPPED)


class Run:
    """What has been heard, and until when it is waited for; in seconds of the monotonic clock."""

    def __init__(self, transport: Transport, asking: Collection[int], came: Heard) -> None:
        self._transport, self._asking, self._came = transport, asking, came
        self.number: int | None = None
        """The signal that ends the run."""
        self.wishes = Wishes()
        self._late = False  # whether ranks have not saved in time
        self._failed, self._asked, self._deadline = math.inf, math.inf, math.inf

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have a signal that has come, or comes, raise RanksFailedError."""
        self._check()
        self._came.then = self._check
        try:
            yield
        finally:
            self._came.then = None

    def ask(self, number: int) -> None:
        """Have ranks that save do so, once, as if the signal had come."""
        if self.wishes.first is None:
            self._came.append(number)

    def wait(self) -> None:
        """Until all has ended, or time is up."""
        while True:
            ended = self._transport.look()
            while self._came:  # perhaps one that was sent to the ranks, too, and has ended them
                self._heed(self._came.pop(0))
            if ended:
                return
            now = time.monotonic()
            if self._failed == math.inf and self._transport.failing():
                self._failed = now
            if now >= self._failed + self._transport.grace and self._deadline == math.inf:
                self._end(None)
            if now > self._asked + self._transport.saving and self._deadline == math.inf:
                self.number, self._late, self._deadline = self.wishes.first, True, now
            if now >= self._deadline:
                return

    def left(self) -> float:
        """Seconds for what is about to end."""
        return max(min(self._deadline - time.monotonic(), self._transport.leaving), 0.0)

    def stopped(self) -> RanksFailedError:
        """The error of a run that a signal has ended."""
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
        now = time.monotonic()
        if self.number is not None:
            self._deadline = now
        elif (
            number in self._asking
            and not self.wishes.again(number)
            and (self._asked < now or self._transport.save(number))
        ):
            self._asked = min(self._asked, now)
        else:
            self.number = number
            self._end(number)

    def _end(self, number: int | None) -> None:
        self._deadline = time.monotonic() + self._transport.leaving
        self._transport.end(number)
