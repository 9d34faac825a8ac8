"""Has whatever ends a run of `polyreme train` before its time say what is next, and remembers the command
that was given.

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
from polyreme.errors import ConfigError, PolyremeError

if TYPE_CHECKING:
    from polyreme.config import Config


@contextmanager
def told(config: Config, speaks: bool, knows: bool) -> Iterator[None]:
    """Add to an error, or to Ctrl-C, that ends the run of `config`: its newest complete checkpoint, and the
    command that goes on from it.

    speaks: whether this process is to say it, and no other. knows: whether its own command is what the user
    gave; ranks that it starts then know it, too."""
    before = set(Path(config.checkpoint.folder).glob("step-*"))
    mine = knows and COMMAND not in os.environ
    if mine:
        os.environ[COMMAND] = typed()
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        usage = isinstance(error, PolyremeError) and error.exit_status == ConfigError.exit_status
        if speaks and not usage and not isinstance(error, typer.Exit | typer.BadParameter):
            from polyreme.job.ending import last_words

            error.add_note(last_words(config, before))
        raise
    finally:
        if mine:
            del os.environ[COMMAND]


def typed() -> str:
    """The command that this process was started by, as a shell takes it."""
    as_module = Path(sys.argv[0]).name == "__main__.py"
    return shlex.join([*(["python", "-m"] if as_module else []), "polyreme", *sys.argv[1:]])
