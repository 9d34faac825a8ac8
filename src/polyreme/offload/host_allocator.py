"""Settings of glibc's memory allocator, which every tensor on a CPU comes from: to keep freed memory, or to
give it back to the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LARGEST = (1 << 31) - 1  # bytes: the most that mallopt takes, an int
ALLOWED = 32 << 20  # the most that an older glibc takes for MMAP_THRESHOLD
# blocks of this size go back to the kernel when freed; smaller ones come and go in each operator, and hold
# little
GIVEN_BACK = 16 << 20


def decided(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment says how glibc allocates, even by an empty variable."""
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in variables)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for this process (up to 2 GiB at the heap's end) instead of giving it back
    to the kernel, from where every step would fault it in again, page by page. Does nothing where the
    environment decides, or with another C library."""
    tell = _mallopt()
    if tell(MMAP_THRESHOLD, LARGEST) or tell(MMAP_THRESHOLD, ALLOWED):
        tell(TRIM_THRESHOLD, LARGEST)


def give_freed_memory_back() -> None:
    """Make glibc give blocks of 16 MiB and more back to the kernel as they are freed. By itself it raises
    that size to that of the blocks it has seen, up to 32 MiB, and its heap keeps them. Does nothing where the
    environment decides, or with another C library."""
    tell = _mallopt()
    tell(MMAP_THRESHOLD, GIVEN_BACK)  # setting it also stops glibc from raising it
    tell(TRIM_THRESHOLD, GIVEN_BACK)


def _mallopt() -> Callable[[int, int], int]:
    """Return glibc's `mallopt`, or a function that refuses everything where the environment decides or there
    is none."""
    found: Callable[[int, int], int] | None = (
        getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    )
    return (lambda option, value: 0) if found is None or decided() else found
