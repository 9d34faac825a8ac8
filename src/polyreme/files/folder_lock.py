"""Locks on folders: a folder belongs to one run at a time, and all ranks and tiers of the run share it.

Invariants: a claim lives as long as a process holds a lock on its file, which the kernel releases however the
process ends; it is changed only under an exclusive lock, so whoever reads it under a shared one reads it
whole. Where a file system keeps locks to each host, the claim of another host is never taken over; where it
has no locks at all, nothing is refused. No communication."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from polyreme.errors import PolyremeError, TierError
from polyreme.files.direct_io import no_links
from polyreme.files.machine import boot

log = logging.getLogger(__name__)

NAME = "polyreme.files.folder_lock"
PATIENCE = 0.5
"""Seconds that another run, which may be ending, gets to leave."""
MOUNTS = Path("/proc/self/mountinfo")


class Claim:
    """A claim on `folder`, which is made if need be, for `run`, a name that the ranks of a run share and no
    other run has.

    `name`: of the claim's file. `keep`: the file stays when the claim is released. `patience`: seconds that
    another run gets to leave. Raises `error` where the folder cannot be used, or a living process of another
    run has claimed it. The claim of a run whose processes all died is taken over."""

    def __init__(
        self,
        folder: Path,
        run: str,
        name: str = NAME,
        *,
        keep: bool = False,
        patience: float | None = None,
        error: type[PolyremeError] = TierError,
    ) -> None:
        path, there = folder / name, folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _take(path, run, PATIENCE if patience is None else patience, error)
        except OSError as reason:
            if not there:
                _remove_empty(path)
            link = f"{name} in it is a symbolic link" if reason.errno == errno.ELOOP else reason.strerror
            raise error(f"{folder} cannot be used: {link}") from reason
        self.close: Callable[[], object] = weakref.finalize(self, _leave, path, descriptor, os.getpid(), keep)
        """Release the claim; the last process of the run removes the file. Further calls do nothing."""


def _remove_empty(path: Path) -> None:
    """Remove a claim that could not be written, and its folder if it is empty then."""
    with suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()


def holder(folder: Path, name: str = NAME) -> str | None:
    """Return the name of another living process that has claimed the folder; None if there is none. Changes
    nothing."""
    try:
        descriptor = no_links(folder / name, os.O_RDONLY)
    except OSError:
        return None
    try:
        if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return None
        claim = _read(descriptor)
    finally:
        os.close(descriptor)
    return (
        None
        if (claim.get("pid"), claim.get("host")) == (os.getpid(), socket.gethostname())
        else _named(claim)
    )


def _take(path: Path, run: str, patience: float, error: type[PolyremeError]) -> int:
    """Claim the folder, waiting up to `patience` seconds for another run to leave. Returns the descriptor
    that holds the lock."""
    deadline = time.monotonic() + patience
    while True:
        descriptor = no_links(path, os.O_RDWR | os.O_CREAT)
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_named(path, descriptor):
                _rewrite(path, descriptor, run, error)
            # this replaces the exclusive lock, and another process may get in between
            _lock(descriptor, fcntl.LOCK_SH)
            claim = _read(descriptor)
            if _is_named(path, descriptor):
                if claim.get("run") == run:
                    return descriptor
                if time.monotonic() > deadline:
                    raise error(
                        f"{path.parent} is in use by another run, which {_named(claim)} "
                        f"began {claim.get('since')}: let it end, or choose "
                        "another folder"
                    )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.01)


def _rewrite(path: Path, descriptor: int, run: str, error: type[PolyremeError]) -> None:
    dead = _read(descriptor)
    if dead and dead.get("run") != run:
        if (
            dead.get("host") != socket.gethostname()
            and dead.get("boot") != boot()
            and not _locks_reach_other_hosts(descriptor)
        ):
            raise error(
                f"{path.parent} was claimed by {_named(dead)} ({dead.get('since')}), "
                "and whether that has ended cannot be known from here, "
                "as this file system keeps locks to each host: if "
                f"it has, delete {path}; else choose another folder"
            )
        log.warning("%s: taken over from a run that died (%s)", path.parent, _named(dead))
    claim = {
        "run": run,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": boot(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(claim).encode(), 0)


def _named(claim: dict[str, object]) -> str:
    return f"process {claim.get('pid')} on host {claim.get('host')}"


def _locks_reach_other_hosts(descriptor: int) -> bool:
    """Return whether a lock that another host has on the open file would be seen here; True for a file system
    of this host alone."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return True
    for fields in mounts:
        if fields[2] == number:
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            apart = kind.startswith("fuse") or kind in ("9p", "virtiofs", "beegfs")
            return not apart and not {"local_lock=flock", "local_lock=all", "localflock"} & {*options}
    return True


def _read(descriptor: int) -> dict[str, object]:
    """Return the fields of a claim; none where it is not valid."""
    try:
        found = json.loads(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _leave(path: Path, descriptor: int, pid: int, keep: bool) -> None:
    if (
        not keep
        and os.getpid() == pid
        and _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        and _is_named(path, descriptor)
    ):
        path.unlink()  # nobody else holds it (a forked child only seems to hold its parent's)
    os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock the file, replacing this descriptor's lock. Returns False where others are in the way and `kind`
    does not wait."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # file systems without locks
            raise
    return True


def _is_named(path: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
