"""Limits that the system sets for a process, which libraries report only as tracebacks.

Invariant: a limit too low to begin with is reported before anything is imported; one that ends a process
later is named, with the value to set."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from polyreme.errors import LaunchError

FILES, ADDRESSES = 64, 5 << 28
"""Open files, and bytes of address space, that a rank needs to begin."""
MOST_FILES = 1 << 16
NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "bad_alloc", "failed to map segment",
             "not enough memory", "can't start new thread", "mmap can't allocate")  # fmt: skip


def check() -> None:
    """Raise the limit of open files of this process, and those that it starts, as far as allowed. Raises
    LaunchError where any limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if 0 <= soft < FILES:
        raise LaunchError(
            f"a process may have {soft} open files here (ulimit -n), and needs {FILES} and more: set "
            "ulimit -n 4096 before the command, or in the batch system"
        )
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= addresses < ADDRESSES:
        raise LaunchError(
            f"a process may have {addresses:,} bytes of addresses here (ulimit -v), and a rank takes "
            f"{ADDRESSES:,} to begin: set ulimit -v unlimited before the command, or in the batch system"
        )


def named(error: BaseException) -> LaunchError | None:
    """Return an error that names the limit which caused `error`, and what to set; None if no limit did."""
    for each in _chain(error):
        said = str(each).lower()
        if isinstance(each, OSError) and each.errno in (errno.EMFILE, errno.ENFILE):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return LaunchError(
                f"this process has as many open files as it may have, {most} (ulimit -n): raise that before "
                "the command, or in the batch system"
            )
        addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
        if addresses >= 0 and (isinstance(each, MemoryError) or any(word in said for word in NO_MEMORY)):
            return LaunchError(
                f"this process may have {addresses:,} bytes of addresses (ulimit -v), and needs more: set "
                f"ulimit -v unlimited before the command, or in the batch system ({type(each).__name__})"
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and its causes."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
