"""The signals that ask a run to save and stop: schedulers send them some time before they end a job. And
Ctrl-C before a run begins.

Invariant: while nobody listens they do what they always do, which is to end the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

WISHES = (signal.SIGTERM, signal.SIGUSR1)
"""What `docker stop`, systemd, Kubernetes and Slurm send, and what Slurm can be told to send."""
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""What a launcher takes as the wish to end, unless its ranks save at it."""


@contextmanager
def hearing(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Have these signals do nothing but grow a list. In any other thread than the main one, and for those
    that whoever started this process had it ignore, nothing changes."""
    came: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(number)

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


@contextmanager
def listening(told: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `told` with each of WISHES that this process gets. It runs between two of the main thread's Python
    instructions.

    In any other thread, and for a signal whose handler is not Python's, nothing changes."""
    here = threading.current_thread() is threading.main_thread()
    before = {
        number: action for number in WISHES if here and (action := signal.getsignal(number)) is not None
    }

    def handle(number: int, frame: FrameType | None) -> None:
        told(signal.Signals(number))

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


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
