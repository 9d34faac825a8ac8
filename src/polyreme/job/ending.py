"""The message where a run of `polyreme train` ends before its time: the newest complete checkpoint, and the
command that goes on from it.

Invariant: reads only, and raises nothing of its own. No communication."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.run_directory import RunDirectory, is_whole
from polyreme.config import Config
from polyreme.distributed.environment import COMMAND
from polyreme.errors import CheckpointError
from polyreme.job.ended import is_end
from polyreme.job.resume import origin


def last_words(config: Config, before: Collection[tuple[Path, int]] = ()) -> str:
    """Describe the newest complete checkpoint of the run that `config` describes, if there is one, and how to
    go on. `before`: the `checkpoint_entries` of its folder when it began."""
    try:
        found = _newest(config, before)
    except OSError as error:  # a folder that cannot be read any more
        return f"{config.checkpoint.folder} cannot be read ({error.strerror})"
    if found is not None and is_end(found, config):
        return f"{found} is the end of this run"
    command = command_from(found, config)
    if found is None:
        said, how = "there is no complete checkpoint yet", "begins anew"
    else:
        said, how = f"the newest complete checkpoint is {found}", "goes on from it"
    return f"{said}; this {how}:\n  {command}" if command else f"{said}; the same command {how}"


def command_from(checkpoint: Path | None, config: Config) -> str | None:
    """Return the user's command in the form that goes on from `checkpoint`, or begins again without one; None
    where it is not known, as under another launcher."""
    words = shlex.split(os.environ.get(COMMAND, ""))
    if checkpoint is not None and config.checkpoint.resume == "never":
        words = [word for word in words if word != "--no-resume"] + ["--resume", str(checkpoint)] * bool(
            words
        )
    return shlex.join(words) or None


def _newest(config: Config, before: Collection[tuple[Path, int]]) -> Path | None:
    section, folder = config.checkpoint, RunDirectory(config.checkpoint.folder)
    if section.resume == "auto":
        return _first_whole(folder.candidates())
    wanted = origin(config)
    own = [
        path
        for path in reversed(folder.saved())
        if (path, path.lstat().st_mtime_ns) not in before or (wanted and _origin(path) == wanted)
    ]
    if wanted is None:
        return _first_whole(own)
    return _first_whole([*own, *RunDirectory(wanted).candidates(), Path(wanted)])


def _first_whole(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if is_whole(path)), None)


def _origin(checkpoint: Path) -> object:
    try:
        found = Directory(checkpoint).resume
    except CheckpointError:
        return None
    return found and found.extra.get("origin")
