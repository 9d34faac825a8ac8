"""glibc's memory allocator, which every tensor on a CPU comes from, told to keep what is freed, or to give it
back to the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LARGEST = (1 << 31) - 1  # bytes: the most that mallopt takes, an int
ALLOWED = 32 << 20  # and the most that an older glibc takes for MMAP_THRESHOLD
# blocks this large leave as they are freed; smaller ones come and go in each operator, and hold little
GIVEN_BACK = 16 << 20


def decided(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether whoever started this process has said how glibc allocates, even by an empty variable."""
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in variables)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for this process (up to 2 GiB at the heap's end) instead of giving it back
    to the kernel, from where every step would fault it in again, page by page. Nothing where the environment
    decides, nor with another C library."""
    tell = _mallopt()
    if tell(MMAP_THRESHOLD, LARGEST) or tell(MMAP_THRESHOLD, ALLOWED):
        tell(TRIM_THRESHOLD, LARGEST)


def give_freed_memory_back() -> None:
    """Have glibc give blocks of 16 MiB and more back to the kernel as they are freed. By itself it raises
    that size to that of the blocks it has seen, up to 32 MiB, and its heap keeps them. Nothing where the
    environment decides, nor with another C library."""
    tell = _mallopt()
    tell(MMAP_THRESHOLD, GIVEN_BACK)  # which stops the raising, too
    tell(TRIM_THRESHOLD, GIVEN_BACK)


def _mallopt() -> Callable[[int, int], int]:
    """glibc's function of that name, or one that refuses all, where nobody has to be told."""
    found: Callable[[int, int], int] | None = (
        getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    )
    return (lambda option, value: 0) if found is None or decided() else found
