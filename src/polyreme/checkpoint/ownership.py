"""Ownership of directories: which are checkpoints of ours, and may be replaced or deleted. No others ever
are.

A checkpoint carries `resume.json`, which names each of its files; one that is being written carries
UNFINISHED, from before its first file until resume.json is there. These two are deleted last, so that a
directory is still known as ours whenever the process that deletes it ends. No communication."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from polyreme.checkpoint import manifest
from polyreme.errors import CheckpointError, named

UNFINISHED = "polyreme.unfinished"
"""The file that marks a checkpoint as being written: a `Claim`, which tells whether its writer lives."""
STEP = re.compile(r"step-[0-9]+")
"""The name of a checkpoint in a run's folder."""


def why_not(path: Path) -> str | None:
    """Say why the directory `path` is not ours to delete. None where all of it is ours, or it is empty, or
    there is none."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink():
        return f"it is a symbolic link to {path.readlink()}"
    if not path.is_dir():
        return "it is a file"
    names = sorted(entry.name for entry in path.iterdir())
    if not names or _is_file(path / UNFINISHED):
        return None
    if not carries_manifest(path):
        steps = [name for name in names if STEP.fullmatch(name)]
        if steps:
            return f"it is a folder of checkpoints ({named(steps)})"
        return f"it has no {manifest.NAME} of a checkpoint, but {named(names)}"
    try:
        found = manifest.read(path)
    except CheckpointError as error:
        return str(error)
    known = {manifest.NAME, *(found.files if found else ())}
    folders = {str(parent) for name in known for parent in PurePosixPath(name).parents}
    others = sorted(
        name
        for entry in path.rglob("*")
        if (name := entry.relative_to(path).as_posix())
        not in (folders if entry.is_dir() and not entry.is_symlink() else known)
    )
    return f"it has {named(others)}, which the checkpoint in it does not name as its own" if others else None


def carries_manifest(path: Path) -> bool:
    """Whether the directory is a checkpoint of ours, be it damaged or with other files in it."""
    return not path.is_symlink() and _is_file(path / manifest.NAME)


def check(path: Path) -> None:
    """Raise CheckpointError where a checkpoint written to `path` would replace files that are not ours."""
    if path.name in ("", ".."):
        raise CheckpointError(f"{str(path)!r} is a folder that is there, not a "
                              "name for a checkpoint: give one in it, such as "
                              f"{str(path / 'step-1000')!r}")  # fmt: skip
    for each in (path, path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")):
        if reason := why_not(each):
            inside = f" (such as {path / 'step-1000'})" if each == path and path.is_dir() else ""
            needed = "" if each == path else f", a name that is needed while {path.name} is written"
            raise CheckpointError(f"{each} would be replaced{needed}, and only "
                                  f"a checkpoint of Polyreme ever is: {reason}. "
                                  f"Save to another path{inside}, or move that away")  # fmt: skip


def remove(path: Path) -> None:
    """Delete the directory, if there is one. Raises CheckpointError, and deletes nothing, where it is not
    ours."""
    if not os.path.lexists(path):
        return
    if reason := why_not(path):
        raise CheckpointError(f"{path} was not deleted: {reason}")
    clear(path)
    shutil.rmtree(path)


def clear(path: Path) -> None:
    """Delete the contents of a directory of ours, but the files that mark it as ours."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in (UNFINISHED, manifest.NAME):
            entry.unlink()


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
