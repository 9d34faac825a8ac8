"""The data cache: folders that are built once, with a digest of their inputs in the name.

Invariant: a folder with its final name is complete. It is filled under another name and renamed last, under a
lock that the processes of one host share, so ranks that race for it build it once; where the lock does not
reach (another host, some network file systems) they build equal content, and the first to finish wins. A
killed build leaves a folder `*.unfinished-*`, which nothing reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from filelock import FileLock

from polyreme.errors import DataError


def cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first filled by `build(unfinished_folder)` if it is not there yet.

    Raises:
        DataError: the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished-{uuid4().hex}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                unfinished.mkdir()
                build(unfinished)
                unfinished.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise DataError(
                f"cannot write the data cache {str(folder)!r}: {error}. "
                "Set data.cache to a folder that can be written."
            ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # there only after a failure
    return folder
