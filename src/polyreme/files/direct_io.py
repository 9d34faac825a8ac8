"""Nameless files for data that does not outlive the run, and the page-aligned memory that they are read into
and written from; and files that are opened only where they are, never through a symbolic link.

Invariants: a file's space is allocated when it is made, so no write fails for want of it; a transfer is
whole, or raises TierError. Nothing is left behind when the process ends, however it ends: the kernel frees
nameless files. No communication."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from polyreme.errors import TierError
from polyreme.layout.intervals import round_down, round_up

ALIGNMENT = 4096
"""Bytes of which memory addresses, places in a file and sizes of transfers are multiples, as O_DIRECT
requires on every disk in use."""
HUGE_PAGE = 2 << 20
Call = Callable[[int, Sequence[memoryview], int], int]
_O_TMPFILE, _O_DIRECT = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)  # Linux has them


def no_links(path: str | Path, flags: int) -> int:
    """Open or make a file unless its name is a symbolic link, and return its descriptor: an `opener` for
    files in a run's folder. Raises OSError (ELOOP) for a link, through which data would go elsewhere, and
    OSError (ENXIO) for a pipe that nobody reads."""
    # O_NONBLOCK makes no difference for regular files
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return round_up(nbytes, ALIGNMENT)


def aligned(nbytes: int, pin: bool = False) -> Tensor:
    """Return `nbytes` (a multiple of ALIGNMENT) zeros in page-aligned memory, uint8; with `pin` locked for
    transfers to a CUDA device.

    No page is taken before it is touched, unless it is pinned. Raises TierError where the system gives no
    such memory."""
    if nbytes % ALIGNMENT:
        raise ValueError(f"{nbytes} bytes are no multiple of {ALIGNMENT}")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TierError(f"{nbytes:,} bytes of host memory were refused: {error.strerror}") from error
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    with torch.inference_mode(False):  # the user's inference mode ends before the memory's use
        tensor = torch.frombuffer(view, dtype=torch.uint8)
    if pin:
        _pin(view, memory, tensor)
    return tensor


def _pin(view: memoryview, memory: mmap.mmap, tensor: Tensor) -> None:
    """Lock the memory until `tensor`'s last view is gone. torch's own pinned memory would be rounded up to a
    power of two."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    status = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if status:
        raise TierError(
            f"{tensor.nbytes:,} bytes of host memory could not be pinned "
            f"(CUDA error {status}): is the limit of `ulimit -l` too low?"
        )

    def unpin(memory: mmap.mmap) -> None:  # the argument keeps it mapped until then
        runtime.cudaHostUnregister(address)

    weakref.finalize(view, unpin, memory).atexit = False


def transfer(
    call: Call, descriptor: int, memory: memoryview, at: int, unit: int
) -> tuple[int, OSError | None]:
    """Read or write (`call`: os.preadv or os.pwritev) all of `memory` at the file's byte `at`. Returns how
    many bytes were moved, and the error that ended it early, if any; it also ends early at the end of the
    file, or where nothing more is taken.

    `unit`: partial transfers are cut to multiples of it, so that the next begins at one; the rest is moved
    again."""
    done = 0
    while done < len(memory):
        try:
            count = call(descriptor, [memory[done:]], at + done)
        except OSError as error:
            return done, error
        whole = round_down(count, unit)
        if not whole:
            return done + count, None
        done += whole
    return done, None


def check_space(needed: Mapping[Path, int]) -> None:
    """Raise TierError unless the file systems of these folders have that many bytes free; folders of one file
    system are added up."""
    systems: dict[int, list[Path]] = {}
    free: dict[Path, int] = {}
    for folder in needed:
        try:
            systems.setdefault(folder.stat().st_dev, []).append(folder)
            free[folder] = _free(folder)
        except OSError as error:
            raise TierError(
                f"{folder} cannot be used: {error.strerror}. {needed[folder]:,} bytes are needed there"
            ) from error
    for folders in systems.values():
        total, left = sum(needed[folder] for folder in folders), free[folders[0]]
        if total > left:
            where = ", ".join(map(str, folders))
            raise TierError(
                f"{where}: {total:,} bytes needed, {left:,} free. "
                "Free some, or choose a folder of another disk"
            )


class File:
    """A nameless file of `nbytes` (rounded up to ALIGNMENT), of zeros, in an existing `folder`. Several
    threads may use it.

    `direct`: transfers bypass the page cache (O_DIRECT); False where that is not wanted, or the file system
    refuses it. Raises TierError where the folder cannot be used or has too little room."""

    def __init__(self, folder: Path | str, nbytes: int, direct: bool = True) -> None:
        self.folder, self.nbytes = Path(folder), padded(nbytes)
        check_space({self.folder: self.nbytes})
        try:
            self._descriptor = _nameless(self.folder)
            self.close: Callable[[], object] = weakref.finalize(self, os.close, self._descriptor)
            """Free the space. Further calls do nothing."""
            if self.nbytes:
                os.posix_fallocate(self._descriptor, 0, self.nbytes)
        except OSError as error:
            raise TierError(
                f"{self.folder}: no file of {self.nbytes:,} bytes can "
                f"be made ({_free(self.folder):,} free): {error.strerror}"
            ) from error
        self.direct = direct and _go_direct(self._descriptor)

    def read(self, memory: Tensor, at: int) -> None:
        """Fill all of `memory` (of any dtype, contiguous, as from `aligned`) with the bytes of the file from
        `at` on."""
        self._transfer("read", os.preadv, memory, at)

    def write(self, memory: Tensor, at: int) -> None:
        """Write all of `memory` into the file from `at` on."""
        self._transfer("write", os.pwritev, memory, at)

    def _transfer(self, what: str, call: Call, memory: Tensor, at: int) -> None:
        if (
            memory.data_ptr() % ALIGNMENT
            or memory.nbytes % ALIGNMENT
            or at % ALIGNMENT
            or not 0 <= at <= self.nbytes - memory.nbytes
        ):
            raise ValueError(f"{memory.nbytes} bytes at address {memory.data_ptr():#x} "
                             f"and {at} of a file of {self.nbytes}: all are to be "
                             f"multiples of {ALIGNMENT}, and within the file")  # fmt: skip
        data = memory.view(torch.uint8).numpy().data
        moved, error = transfer(call, self._descriptor, data, at, ALIGNMENT)
        reason = "it ended early" if error is None else error.strerror or str(error)
        left = memory.nbytes - round_down(moved, ALIGNMENT)
        if left:
            raise TierError(
                f"{self.folder}: {what} of {memory.nbytes:,} bytes failed with {left:,} to go ({reason}); "
                f"the file has {self.nbytes:,} bytes, {_free(self._descriptor):,} are free"
            )


def _nameless(folder: Path) -> int:
    """Return the descriptor of a new file without a name."""
    if _O_TMPFILE:
        try:
            return os.open(folder, _O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
        except OSError as error:
            # other errors do not mean that the file system lacks O_TMPFILE
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    descriptor, name = tempfile.mkstemp(prefix=".polyreme-", dir=folder)
    os.unlink(name)  # noqa: PTH108
    return descriptor


def _go_direct(descriptor: int) -> bool:
    """Turn O_DIRECT on. Returns False, with it off, where it is refused, at once or at the first read."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        os.preadv(descriptor, [aligned(ALIGNMENT).numpy().data], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return bool(_O_DIRECT)


def _free(where: Path | int) -> int:
    """Return the bytes that the file system of a folder or of an open file has left for this user."""
    status = os.statvfs(where)
    return status.f_bavail * status.f_frsize
