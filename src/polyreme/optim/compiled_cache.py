"""Keeps what numba compiles of `compiled_kernels` on disk, in the user's folder for such things
($XDG_CACHE_HOME/polyreme, or ~/.cache/polyreme), so that a run does not compile what another one did.

Invariants: numba's files are pickles, so nothing is read but in a folder of this user's alone (mode 0700) in
one where nobody else can put another in its place; without such a folder, or where it cannot be written,
loops are compiled anew, and that is no error. Numba's own version, the processor, llvmlite and the source are
part of what is looked up. Of processes that write at once, one does; the others need not."""

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
    """Have these functions of the file `source` look for their compiled forms on disk, by their names."""
    if (found := folder()) is None:
        return
    with suppress(OSError):
        stamp = (hashlib.sha256(Path(source).read_bytes()).hexdigest(), llvmlite.__version__, ALIGN)
        for name, function in functions.items():
            function._cache = _Kept(found, IndexDataCacheFile(str(found), name, stamp))


def folder() -> Path | None:
    """The user's own folder, which is made; None where there cannot be one."""
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
    """The compiled forms of one function, as numba asks for them."""

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
        except Exception:  # a file that is not whole can make unpickling raise any
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.library.has_dynamic_globals:
            return
        with suppress(OSError), (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._file.save((sig, data.codegen.magic_tuple()), data._reduce())
            except Exception:  # of an index that is not whole
                self._file.flush()

    def enable(self) -> None:
        """Do nothing: it is."""

    def disable(self) -> None:
        """Do nothing: nobody asks for it."""

    def flush(self) -> None:
        self._file.flush()
