"""The signals that ask a run to save and stop: schedulers send them some time before they end a job. And
Ctrl-C before a run begins.

Invariant: while nobody listens they do what they always do, which is to end the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

WISHES = (signal.SIGTERM, signal.SIGUSR1)
"""What `docker stop`, systemd, Kubernetes and Slurm send, and what Slurm can be told to send."""
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""What a launcher takes as the wish to end, unless its ranks save at it."""
ONE_SIGNAL = 2.0
"""Seconds in which the same signal again is no second one: schedulers send theirs to every process, and some
forward it."""
ONE_PRESS = 0.5
"""And those in which Ctrl-C is none: a terminal sends it to every process, and some forward it."""


class Heard(list[int]):
    """Signals that have come. `then` is called after each."""

    then: Callable[[], object] | None = None


@contextmanager
def hearing(numbers: Iterable[int]) -> Iterator[Heard]:
    """Have these signals do nothing but grow a list. In any other thread than the main one, and for those
    that whoever started this process had it ignore, nothing changes."""
    came = Heard()

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if came.then is not None:
            came.then()

    here = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, hear)
        for number in numbers
        if here and signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        yield came
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class Wishes:
    """The wishes that have come in a run: which of them is to end it at once."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._since: dict[int, float] = {}  # by signal, in seconds of the monotonic clock

    def again(self, number: int) -> bool:
        """Take note of a wish. Whether the run is to end at once by it: a second SIGTERM, and Ctrl-C after
        any other wish; not those that come with the first, as several processes may send it."""
        now, interrupt = time.monotonic(), number == signal.SIGINT
        since = min(self._since.values(), default=now) if interrupt else self._since.get(number, now)
        self._since.setdefault(number, now)
        self.first = self.first or signal.Signals(number)
        return number != signal.SIGUSR1 and now > since + (ONE_PRESS if interrupt else ONE_SIGNAL)


def acknowledge(number: int) -> None:
    """Say at once, on stderr, that a wish was heard."""
    again = "again" if number == signal.SIGINT else "Ctrl-C"
    name = signal.Signals(number).name
    text = f"{name}: ending after the step under way, which is saved; {again} to end at once"
    _tell(f"\n{text}\n\n" if os.isatty(2) else f"{text}\n")  # lines that a bar, drawn anew, does not erase


@contextmanager
def listening(
    told: Callable[[signal.Signals], None], aloud: bool = False, last_words: Callable[[], str] = str
) -> Iterator[None]:
    """Call `told` with each wish that this process gets, Ctrl-C too. It runs between two of the main thread's
    Python instructions.

    A thread hears them as well, whatever the main one is doing: `aloud`, it says so at once, and one that
    comes again ends the process there, with `last_words`. In any other thread than the main one, and for a
    signal whose handler is not Python's, nothing changes."""
    here = threading.current_thread() is threading.main_thread()
    before = {
        number: action
        for number in (*WISHES, signal.SIGINT)
        if here and (action := signal.getsignal(number)) is not None
        and not (number == signal.SIGINT and action == signal.SIG_IGN)
    }  # fmt: skip

    def handle(number: int, frame: FrameType | None) -> None:
        told(signal.Signals(number))

    with _heard_at_once(before, aloud, last_words) if before else nullcontext():
        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)


def listens(process: int) -> bool:
    """Whether a process is within `listening`, as nothing else takes SIGUSR1; True where the system does not
    tell."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "f" * 16)
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


@contextmanager
def _heard_at_once(numbers: Container[int], aloud: bool, last_words: Callable[[], str]) -> Iterator[None]:
    """Have a thread read which signals come, as Python's handler of the system writes them to a pipe."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    wishes = Wishes()

    def hear() -> None:
        while heard := os.read(read, 1):
            number = heard[0]
            if number not in numbers:
                continue
            known = wishes.first is not None
            if wishes.again(number):
                if os.isatty(1):
                    _tell("\x1b[?25h")  # a bar hides the cursor
                _tell(f"ended by {signal.Signals(number).name}\n{last_words()}\n")
                os._exit(128 + number)
            if aloud and not known:
                acknowledge(number)

    thread = threading.Thread(target=hear, name="polyreme signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join()
        os.close(read)


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody reads
        os.write(2, text.encode())


@contextmanager
def importing() -> Iterator[None]:
    """Have Ctrl-C end the process at once while modules are imported, without their tracebacks: nothing is to
    be put in order yet, and some modules would swallow it. A handler of the user's own stays."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
