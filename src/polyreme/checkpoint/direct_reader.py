"""Direct I/O for checkpoints: reads and writes files past the page cache, where the system allows it, which
saves a copy and the cache's memory. Pages that are in the cache already are read from there.

Invariant: a page of a file goes through the cache or past it, never both ways at a time, if its writers write
different bytes. No communication."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.checkpoint.files import damaged
from polyreme.files.direct_io import ALIGNMENT, Call, transfer
from polyreme.layout.intervals import ceil_div, round_down, round_up

SMALL = 1 << 16
"""Bytes. Smaller reads and writes go through the page cache, which collects them."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_SYNC_FILE_RANGE_WRITE = 2
_begin_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Starts writing pages that would otherwise wait in memory for the fsync. Linux."""
if _begin_writing is not None:
    _begin_writing.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_mincore = getattr(ctypes.CDLL(None), "mincore", None)
"""Tells which pages of a mapping are in memory, without reading any."""
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def cover(begin: int, end: int) -> tuple[int, int]:
    """The first byte of the first page, and the end of the last, that the bytes [begin, end) are in."""
    return round_down(begin, ALIGNMENT), round_up(end, ALIGNMENT)


class DirectFile:
    """An open file, of which threads read or write different ranges. write: open it for writing, not reading.

    Direct reads and writes begin and end at multiples of ALIGNMENT, in the file and in memory. So memory that
    is read into begins at a page, and has room for whole pages (see `cover`)."""

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path, self._flags = path, os.O_WRONLY | os.O_NOFOLLOW if write else os.O_RDONLY
        self.descriptor = os.open(path, self._flags)
        self._close = contextlib.ExitStack()
        self._close.callback(os.close, self.descriptor)
        self._past: int | None = None if _O_DIRECT else self.descriptor
        self._opening = threading.Lock()
        self._mapped: np.ndarray[Any, Any] | None = None

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        self._close.close()

    def sync(self) -> None:
        """Flush all writes to the disk."""
        os.fsync(self.descriptor)

    def _direct(self) -> int:
        """The descriptor for direct I/O; the ordinary one on a file system without it."""
        with self._opening:
            if self._past is None:
                try:
                    self._past = os.open(self.path, self._flags | _O_DIRECT)
                    self._close.callback(os.close, self._past)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._past = self.descriptor
            return self._past

    def _refused(self, descriptor: int, error: OSError) -> bool:
        """Whether the error means that the file system does not allow direct I/O, which is not used again
        then."""
        if descriptor == self.descriptor or error.errno != errno.EINVAL:
            return False
        self._past = self.descriptor
        return True

    def write(self, memory: memoryview, begin: int) -> None:
        """Write whole pages to the file from `begin` on, past the cache."""
        self._write(self._direct(), memory, begin)

    def write_cached(self, memory: memoryview, begin: int) -> None:
        """Write `memory`, of any alignment, to the file from `begin` on, through the cache."""
        self._write(self.descriptor, memory, begin)

    def _write(self, descriptor: int, memory: memoryview, begin: int) -> None:
        moved = self._transfer(os.pwritev, descriptor, memory, begin)
        if descriptor != self.descriptor and moved < len(memory):
            # the rest through the cache, which takes it or raises the reason
            moved = round_down(moved, ALIGNMENT)
            descriptor = self.descriptor
            moved += self._transfer(os.pwritev, descriptor, memory[moved:], begin + moved)
        if moved < len(memory):
            raise OSError(errno.EIO, f"{len(memory) - moved} bytes could not be written", str(self.path))
        if _begin_writing is not None and descriptor == self.descriptor and len(memory) >= SMALL:
            _begin_writing(descriptor, begin, len(memory), _SYNC_FILE_RANGE_WRITE)

    def _transfer(self, call: Call, descriptor: int, memory: memoryview, at: int) -> int:
        """Read or write by `descriptor`, or through the cache where direct I/O is refused. Returns the bytes
        moved."""
        unit = 1 if descriptor == self.descriptor else ALIGNMENT
        moved, error = transfer(call, descriptor, memory, at, unit)
        if error is None:
            return moved
        if not self._refused(descriptor, error):
            raise error
        return moved + self._transfer(call, self.descriptor, memory[moved:], at + moved)

    def is_cached(self, begin: int, end: int) -> bool:
        """Whether all pages of the bytes [begin, end), at least one, are in the page cache. begin: the first
        byte of a page. Linux always says yes for files that this user may not write."""
        if self._mapped is None:
            self._mapped = np.empty(0, dtype=np.uint8)
            with contextlib.suppress(OSError, ValueError):  # a file system without mappings, an empty file
                self._mapped = np.frombuffer(
                    mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ), dtype=np.uint8
                )
        if _mincore is None or end > len(self._mapped):
            return False
        # the first page mostly tells, and all would take 0.1 ms
        for stop in (min(begin + mmap.PAGESIZE, end), end):
            pages = ctypes.create_string_buffer(ceil_div(stop - begin, mmap.PAGESIZE))
            if _mincore(self._mapped.ctypes.data + begin, stop - begin, pages) or not all(
                page & 1 for page in pages.raw
            ):
                return False
        return True

    def read(self, memory: memoryview, begin: int, end: int, cached: bool) -> memoryview:
        """Read the bytes [begin, end) of the file into `memory`, which has room for their pages. Returns
        them.
        cached: read through the page cache, as they are there, or others will read them, too. Raises
        CheckpointError where the file ends before."""
        base, stop = cover(begin, end)
        descriptor = self.descriptor if cached or end - begin < SMALL else self._direct()
        reached = base + self._transfer(os.preadv, descriptor, memory[: stop - base], base)
        if reached < end:
            raise damaged(self.path, f"it ends {end - reached} bytes early")
        return memory[begin - base : end - base]
