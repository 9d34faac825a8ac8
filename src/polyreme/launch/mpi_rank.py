"""Run one rank that mpirun started: `python -m polyreme.launch.mpi_rank [-m] SCRIPT ARGUMENTS...` does what
`python [-m] SCRIPT ARGUMENTS...` does.

Output of other ranks than the first gets `[host rank] ` before each line, from a process beside the rank that
ends with it. An error is reported in a sentence, and Polyreme's own give their exit status. The rank ends
with the process of mpirun that started it. Torch is not imported. Communication: none."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

from polyreme.distributed.environment import detect
from polyreme.distributed.failure import LAST, speak_for
from polyreme.errors import PolyremeError
from polyreme.launch.processes import die_with_parent
from polyreme.launch.rank import run
from polyreme.launch.requests import ENDS
from polyreme.launch.signals import ENDINGS, SAVE_SIGNALS

LONGEST = 1000  # characters of a report that goes to `polyreme launch` in one write


def main() -> None:
    """Run the script or module as this rank."""
    die_with_parent()
    errors, place = os.dup(2), detect()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // place.local_world_size)))
    if place.rank:
        prefix = f"[{socket.gethostname()} {place.rank}] ".encode()
        for standard in 1, 2:
            _prefix(standard, prefix)
    speak_for(place.rank, place.world_size)
    try:
        run(sys.argv[1:])
    except SystemExit as end:
        _tell(errors, end.code if isinstance(end.code, int) else int(end.code is not None), LAST.report)
        raise
    except Exception as error:
        sys.last_value = error  # as Python does for an uncaught error, after which MPI is not finalized
        sys.excepthook(type(error), error, error.__traceback__)
        status = error.exit_status if isinstance(error, PolyremeError) else 1
        _tell(errors, status, LAST.report)
        sys.exit(status)
    _tell(errors, 0)


def _tell(errors: int, status: int, report: str = "") -> None:
    """Report to `polyreme launch` how this rank ends: mpirun may wait for ranks of a host that does not
    answer, or end with status 0 where it lost one."""
    if len(report) > LONGEST:
        report = f"{report[: LONGEST // 2]} ... {report[-LONGEST // 2 :]}"
    said = json.dumps(report, ensure_ascii=False)
    with suppress(OSError):
        os.write(errors, ENDS.format(status & 0xFF, said).encode(errors="replace"))


def _prefix(standard: int, prefix: bytes) -> None:
    """Start a process that writes what this one writes to `standard`, with `prefix` before each line."""
    out, into = os.pipe()
    if child := os.fork():
        os.waitpid(child, 0)
        os.dup2(into, standard)
        os.close(into)
        os.close(out)
        return
    if os.fork():  # orphaned, so that the rank never has to wait for it
        os._exit(0)
    os.close(into)
    for number in {*ENDINGS, *SAVE_SIGNALS}:
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(out, "rb") as lines:
        for line in lines:
            os.write(standard, prefix + line.rstrip(b"\r\n") + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
