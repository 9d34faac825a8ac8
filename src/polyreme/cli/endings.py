"""Add what to do next to whatever ends a run of `polyreme train` before its time, and remember the command
that the user gave.

Invariant: nothing heavy is imported before there is something to say."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyreme.distributed.environment import COMMAND
from polyreme.errors import ConfigError

if TYPE_CHECKING:
    from polyreme.config import Config


@contextmanager
def explained(config: Config, speaks: bool, knows: bool) -> Iterator[None]:
    """Add a note to an error that ends the training of `config` after its first step, or to a signal: the
    newest complete checkpoint, and the command that goes on from it.

    `speaks`: whether this process is the one to say it. `knows`: whether its own command is what the user
    gave; ranks that it starts then know it, too."""
    from polyreme.job.ended import checkpoint_entries

    before = checkpoint_entries(config.checkpoint.folder)
    log = Path(config.checkpoint.folder) / LOG_NAME
    written = log.stat().st_mtime_ns if log.exists() else None
    mine = knows and COMMAND not in os.environ
    if mine:
        os.environ[COMMAND] = typed()
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        signalled = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_status", 0) > 128
        trained = not config.monitor.jsonl or (log.exists() and _has_step(log, written))
        if speaks and (signalled or trained) and not isinstance(error, _USAGE):
            from polyreme.job.ending import last_words

            error.add_note(last_words(config, before))
        raise
    finally:
        if mine:
            del os.environ[COMMAND]


_USAGE = (ConfigError, typer.Exit, typer.BadParameter)
LOG_NAME = "log.jsonl"  # as polyreme.monitor has it, which imports torch


def _has_step(log: Path, before: int | None) -> bool:
    """Return whether a run that began after the log was written at `before` has done a step."""
    text = log.read_text("utf-8", errors="replace") if log.stat().st_mtime_ns != before else ""
    return '"kind": "step"' in text.rpartition('"kind": "run"')[2]


def typed() -> str:
    """Return the command that started this process, as a shell takes it."""
    as_module = Path(sys.argv[0]).name == "__main__.py"
    return shlex.join([*(["python", "-m"] if as_module else []), "polyreme", *sys.argv[1:]])
