"""Whose a folder is: one run's at a time, of which all ranks and tiers share it.

Invariants: a claim lives as long as a process holds a lock on its file, which the kernel lets go however the process ends; it is changed
only under an exclusive lock, so whoever reads it under a shared one reads it whole. No communication.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from polyreme.errors import TierError

log = logging.getLogger(__name__)

NAME = "polyreme.claim"
PATIENCE = 0.5
"""Seconds that another run gets to leave: it may be ending."""


class Claim:
    """Makes `folder` if need be and claims it for `run`, a name that the ranks of a run have in common and no other run has.

    Raises TierError where the folder cannot be used, and where a process of another run lives that claimed it. The claim of a run whose
    processes all died is taken over."""

    def __init__(self, folder: Path, run: str) -> None:
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _take(path, run)
        except OSError as error:
            raise TierError(f"{folder} cannot be used: {error.strerror}") from error
        self.close: Callable[[], object] = weakref.finalize(self, _leave, path, descriptor, os.getpid())
        """Let go; the last one of the run removes the file. Further calls do nothing."""


def _take(path: Path, run: str) -> int:
    """The descriptor by which this process holds the claim."""
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_named(path, descriptor):
                _rewrite(path, descriptor, run)
            _lock(descriptor, fcntl.LOCK_SH)  # not in one step with the exclusive one: another may come between
            claim = _read(descriptor)
            if _is_named(path, descriptor):
                if claim.get("run") == run:
                    return descriptor
                if time.monotonic() > deadline:
                    raise TierError(
                        f"{path.parent} is in use by another run, which process {claim.get('pid')} on host {claim.get('host')} began "
                        f"{claim.get('since')}: let it end, or choose another folder"
                    )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.01)


def _rewrite(path: Path, descriptor: int, run: str) -> None:
    dead = _read(descriptor)
    if dead and dead.get("run") != run:
        log.warning("%s: taken over from a run that died (process %s on host %s)", path.parent, dead.get("pid"), dead.get("host"))
    claim = {"run": run, "pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(claim).encode(), 0)


def _read(descriptor: int) -> dict[str, object]:
    """What a claim says; nothing where it is none."""
    try:
        found = json.loads(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _leave(path: Path, descriptor: int, pid: int) -> None:
    if os.getpid() == pid and _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_named(path, descriptor):
        path.unlink()  # nobody else holds it (a forked child only seems to hold its parent's)
    os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock the file, instead of what lock this descriptor has; False where others are in the way and it is not to wait."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    return True


def _is_named(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
