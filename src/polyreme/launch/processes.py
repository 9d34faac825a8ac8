"""Process control that the operating system does for a launcher. Invariant: a process that called
`die_with_parent` does not outlive its parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to send SIGKILL to this process when its parent ends, in whichever way. Linux only.

    `parent` is the process id of whoever started this process, to detect that it ended before this call."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def leave(status: int) -> NoReturn:
    """End this process as at its usual end, but without clearing modules: for those of torch that takes half
    a second."""
    atexit._run_exitfuncs()
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError, ValueError):  # nobody reads on
            stream.flush()
    os._exit(status)
