"""Keeps numba's compiled forms of `compiled_kernels` on disk, in the user's cache folder
($XDG_CACHE_HOME/polyreme, or ~/.cache/polyreme), so that each is compiled in one run only.

Invariants: numba's files are pickles, so they are read only from a folder that this user alone can access
(mode 0700), whose parent lets nobody else replace it; without such a folder, or where it cannot be written,
loops are compiled again, without an error. The versions of numba and llvmlite, the processor and the source
are part of the key. Of several processes that would write at once, only one does."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
from numba.core.caching import IndexDataCacheFile, _Cache
from numba.core.compiler import CompileResult

from polyreme.layout.bucket_layout import ALIGN


def keep(source: str, **functions: Any) -> None:
    """Make these functions, by name, of the file `source` load and save their compiled forms on disk."""
    if (found := folder()) is None:
        return
    with suppress(OSError):
        stamp = (hashlib.sha256(Path(source).read_bytes()).hexdigest(), llvmlite.__version__, ALIGN)
        for name, function in functions.items():
            function._cache = _Kept(found, IndexDataCacheFile(str(found), name, stamp))


def folder() -> Path | None:
    """Return the user's cache folder, and make it; None where there is no safe one."""
    with suppress(OSError, RuntimeError):  # no home
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        own = base / "polyreme"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)
        status, above = own.lstat(), base.stat()
        private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        replaced = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
        if private and base.is_absolute() and not replaced and above.st_uid in (0, os.getuid()):
            return own
    return None


class _Kept(_Cache):
    """The cache on disk of one function's compiled code, one entry for each types of arguments. numba calls
    its methods."""

    def __init__(self, folder: Path, file: Any) -> None:
        self._folder, self._file = folder, file

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        try:
            found = self._file.load((sig, target_context.codegen().magic_tuple()))
            return None if found is None else CompileResult._rebuild(target_context, *found)
        except Exception:  # unpickling an incomplete file can raise anything
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.library.has_dynamic_globals:
            return
        with suppress(OSError), (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._file.save((sig, data.codegen.magic_tuple()), data._reduce())
            except Exception:  # the index is incomplete
                self._file.flush()

    def enable(self) -> None:
        """Do nothing: it is always on."""

    def disable(self) -> None:
        """Do nothing: it is always on."""

    def flush(self) -> None:
        self._file.flush()
