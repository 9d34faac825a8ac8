"""Call in a thread of its own what waits in compiled code, where no signal handler of Python's runs: the
caller stays interruptible. Communication: a look-up of a name may ask a name server."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def apart(call: Callable[[], T], seconds: float = math.inf) -> T:
    """Call `call` in a thread of its own and return its result. Raises TimeoutError after `seconds`; the
    thread is left behind."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="polyreme waits", daemon=True).start()
    try:
        return future.result(None if seconds == math.inf else max(seconds, 0.0))
    except TimeoutError as late:
        raise late if future.done() else TimeoutError(f"no answer within {seconds:g} s") from None


def look_up(host: str, port: int | None, kind: int = 0) -> list[Any]:
    """Return what `socket.getaddrinfo` does, which may wait for a name server for minutes. Raises OSError."""
    return apart(partial(socket.getaddrinfo, host, port, type=kind))
