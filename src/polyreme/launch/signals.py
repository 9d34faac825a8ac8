"""The signals that ask a run to save and stop, which schedulers send some time before they end a job; and
Ctrl-C before a run begins.

Invariant: while nobody listens, signals have their usual effect, which is to end the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save: what `docker stop`, systemd, Kubernetes and Slurm send, and what Slurm can
be told to send."""
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that end a launcher's run, unless its ranks save at them."""
ONE_SIGNAL = 2.0
"""Seconds within which a repeated signal counts as the first one: schedulers send theirs to every process,
and some processes forward it."""
ONE_PRESS = 0.5
"""Seconds within which a repeated Ctrl-C counts as the first one: a terminal sends it to every process, and
some forward it."""


class Heard(list[int]):
    """The signals that have come. `then` is called after each."""

    then: Callable[[], object] | None = None


@contextmanager
def hearing(numbers: Iterable[int]) -> Iterator[Heard]:
    """Collect these signals in a list instead of their usual effect. Outside of the main thread, and for
    signals that this process was started to ignore, nothing changes."""
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


class SaveRequests:
    """The requests to save that have come in a run, and whether a further one is to end it at once."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._since: dict[int, float] = {}  # by signal, in seconds of the monotonic clock

    def again(self, number: int) -> bool:
        """Record a request. Returns whether it is to end the run at once: a second SIGTERM, or Ctrl-C after
        any other request, but not copies that come with the first one, as several processes may send it."""
        now, interrupt = time.monotonic(), number == signal.SIGINT
        since = min(self._since.values(), default=now) if interrupt else self._since.get(number, now)
        self._since.setdefault(number, now)
        self.first = self.first or signal.Signals(number)
        return number != signal.SIGUSR1 and now > since + (ONE_PRESS if interrupt else ONE_SIGNAL)


def acknowledge(number: int) -> None:
    """Print at once, on stderr, that a request to save was heard."""
    again = "again" if number == signal.SIGINT else "Ctrl-C"
    name = signal.Signals(number).name
    text = f"{name}: ending after the step under way, which is saved; {again} to end at once"
    # blank lines, as a progress bar erases lines when it is redrawn
    _tell(f"\n{text}\n\n" if os.isatty(2) else f"{text}\n")


@contextmanager
def listening(
    call: Callable[[signal.Signals], None], aloud: bool = False, last_words: Callable[[], str] = str
) -> Iterator[None]:
    """Call `call` with each request to save that this process gets, Ctrl-C too, between two Python
    instructions of the main thread.

    A thread hears them as well, whatever the main one is doing: with `aloud` it prints so at once, and a
    repeated request ends the process there, with `last_words`. Outside of the main thread, and for a signal
    whose handler is not Python's, nothing changes. Once a request has come, copies of it are ignored after
    the block, unless `aloud`: a launcher sends one, too."""
    here = threading.current_thread() is threading.main_thread()
    before = {
        number: action
        for number in (*SAVE_SIGNALS, signal.SIGINT)
        if here and (action := signal.getsignal(number)) is not None
        and not (number == signal.SIGINT and action == signal.SIG_IGN)
    }  # fmt: skip

    heard = set[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        heard.add(number)
        call(signal.Signals(number))

    with _heard_at_once(before, aloud, last_words) if before else nullcontext():
        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, action in before.items():
                copied = not aloud and number in SAVE_SIGNALS and not heard.isdisjoint(SAVE_SIGNALS)
                signal.signal(number, signal.SIG_IGN if copied else action)


def ignore_copies() -> None:
    """Ignore further requests to save where Python code handles them: the interpreter would reset such a
    handler as it ends, and a copy that comes late would kill a process that has saved."""
    for number in SAVE_SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def listens(process: int) -> bool:
    """Return whether a process is within `listening`, as only that handles SIGUSR1; True where the system
    does not tell."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "f" * 16)
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


@contextmanager
def _heard_at_once(numbers: Container[int], aloud: bool, last_words: Callable[[], str]) -> Iterator[None]:
    """Read in a thread which signals come, from the pipe to which Python's signal handler writes them."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    requests = SaveRequests()

    def hear() -> None:
        while heard := os.read(read, 1):
            number = heard[0]
            if number not in numbers:
                continue
            known = requests.first is not None
            if requests.again(number):
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
    """Make Ctrl-C end the process at once while modules are imported, without their tracebacks. There is
    nothing to clean up yet, and some modules would swallow it. A handler of the user's own stays."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
