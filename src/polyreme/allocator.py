"""glibc's memory allocator, which every tensor on a CPU comes from, told to keep what is freed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of <malloc.h>
KEPT = (1 << 31) - 1  # bytes: the most that mallopt takes, an int
ALLOWED = 32 << 20  # and the most that an older glibc takes for MMAP_THRESHOLD


def decided(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether whoever started this process has said how glibc allocates, even by an empty variable."""
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in variables)


def keep_freed_memory() -> None:
    """From now on, glibc keeps freed memory for this process (up to 2 GiB at the heap's end) instead of giving it back to the kernel, from
    where every step would fault it in again, page by page. Nothing where the environment decides, nor with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or decided():
        return
    if mallopt(MMAP_THRESHOLD, KEPT) or mallopt(MMAP_THRESHOLD, ALLOWED):
        mallopt(TRIM_THRESHOLD, KEPT)
