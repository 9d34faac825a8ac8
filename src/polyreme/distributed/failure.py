"""Report how a rank fails: in one sentence which rank it was, on which host, why, and where the script was.
The traceback goes to a file.

Imports no torch, as ranks of other programs run without it. Communication: none."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from polyreme.errors import PolyremeError

PACKAGE = str(Path(__file__).parents[1])
SHOWN = 4
"""Most lines of the script that are shown of a chain of calls."""
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _Last:
    """The failure of this process, for those that wait for it: the error, and all that was printed. `hook` is
    the script's own excepthook."""

    error, report = "", ""
    hook: Hook | None = None


LAST = _Last()


def explained(error: BaseException) -> str:
    """Return an error's text, and where the script was: the last line for errors of Polyreme, which explain
    themselves, and the last SHOWN lines for others."""
    said, shown = f"{type(error).__name__}: {error}", SHOWN
    if isinstance(error, PolyremeError):
        said, shown = str(error), 1
    elif isinstance(error, SystemExit):
        said = f"the script called sys.exit({error.code!r})"
    lines = _own_lines(traceback.extract_tb(error.__traceback__))[-shown:]
    return "\n".join([said, *getattr(error, "__notes__", ()), *lines])


def keep(text: str, rank: int) -> str:
    """Write a rank's traceback to a new file in the current folder, or else in that for temporary files.
    Returns where it is."""
    host = socket.gethostname()
    for folder in os.curdir, None:
        try:
            file, path = tempfile.mkstemp(".txt", f"traceback-{host}-rank-{rank}-", folder)
        except OSError:
            continue
        with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as opened:
            opened.write(text)
        return f"{Path(path).absolute()} on {host}"
    return "nowhere: no folder here can be written to"


def traceback_of(error: BaseException) -> str:
    """Return the traceback as from a plain `python script.py`: without the first frames, of runpy and
    Polyreme's own command."""
    ours = [f"{PACKAGE}/{each}.py" for each in ("launch/rank", "launch/mpi_rank", "__main__", "cli/main")]
    starters = (*ours, runpy.__file__, "<frozen runpy>")
    frames = error.__traceback__
    while frames and (
        frames.tb_frame.f_code.co_filename in starters
        or frames.tb_frame.f_globals.get("__name__", "").startswith("typer.")
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def speak_for(rank: int, world_size: int, by_mpi: bool = False) -> None:
    """Install an excepthook that reports an uncaught error of this rank in one sentence. A script's own
    excepthook stays, and is called before. `by_mpi`: also report when MPI ends the rank because of another
    one."""
    usual = ("sys", "typer.main", "torch.distributed.distributed_c10d", __name__)
    if sys.excepthook.__module__ not in usual:
        LAST.hook = sys.excepthook
    who = f"rank {rank} of {world_size} on {socket.gethostname()}"

    def tell(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if LAST.hook or not isinstance(error, Exception):
            (LAST.hook or sys.__excepthook__)(kind, error, frames)
        if isinstance(error, Exception):
            LAST.error, LAST.report = f"{kind.__name__}: {error}", f"{who} failed: {explained(error)}"
            if not isinstance(error, PolyremeError):
                LAST.report += f"\ntraceback: {keep(traceback_of(error), rank)}"
            print(f"error: {LAST.report}", file=sys.stderr, flush=True)

    sys.excepthook = tell
    if by_mpi and threading.current_thread() is threading.main_thread():
        _tell_of_the_end(who)


def _tell_of_the_end(who: str) -> None:
    mine = os.getpid()

    def tell(number: int, frame: FrameType | None) -> None:
        if os.getpid() == mine and not LAST.error:  # not in a process that the rank forked
            lines = _own_lines(traceback.StackSummary.extract(traceback.walk_stack(frame)))[:1]
            said = (
                f"error: {who} was ended by {signal.Signals(number).name}, as MPI does where another rank "
                "failed, was killed or called MPI_Abort: see what that one, or mpirun, says"
            )
            os.write(2, ("\n".join([said, *lines]) + "\n").encode(errors="backslashreplace"))
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, tell)


def _own_lines(frames: traceback.StackSummary) -> list[str]:
    """Return the lines of the script, and of its own modules, among the frames."""
    libraries = (PACKAGE, sys.prefix, sys.base_prefix, "<")
    return [
        f"  at {each.filename}:{each.lineno}: {each.line}"
        for each in frames
        if not each.filename.startswith(libraries) and "-packages/" not in each.filename
    ]
