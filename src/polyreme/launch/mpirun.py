"""Starts ranks by `mpirun` of the MPI library that is found: Open MPI, or MPICH and others with its Hydra.

`command` is a function of what was asked for; `run` starts it, and passes signals on. Each process becomes
`python COMMAND` through `polyreme.launch.mpi_rank`, whose engine finds the other ranks.
Communication: none of ours."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyreme.errors import LaunchError
from polyreme.launch.hostfile import is_this_machine
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import ENDINGS, WISHES, hearing
from polyreme.launch.torchrun import ONE_SIGNAL, RanksFailedError

OPEN_MPI, HYDRA = "Open MPI", "MPICH"
LEAVING = 12.0  # seconds for mpirun to end its ranks


@dataclass(frozen=True)
class Library:
    """An MPI library: its mpirun, and whose options that one has (OPEN_MPI or HYDRA)."""

    mpirun: str
    kind: str


@dataclass(frozen=True)
class Request:
    """What to run: `python COMMAND` on each of the ranks that `hosts` ({name: ranks}) have.

    `variables` are of all ranks. `ssh` reaches other hosts, over `interface` if it is given. `options` are
    more of mpirun's own."""

    command: Sequence[str]
    hosts: Mapping[str, int]
    variables: Mapping[str, str]
    ssh: Sequence[str] = ("ssh",)
    interface: str | None = None
    options: Sequence[str] = ()


def find() -> Library:
    """The library beside this Python, or else the first one on PATH.

    Raises LaunchError where there is none, or none whose options are known."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        raise LaunchError(
            "--mpi runs mpirun, which is not on PATH; pip install mpich mpi4py, or load a module"
        )
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    for mark, kind in (
        ("Open MPI", OPEN_MPI),
        ("Open RTE", OPEN_MPI),
        ("HYDRA", HYDRA),
        ("Intel(R) MPI", HYDRA),
    ):
        if mark in asked.stdout:
            return Library(program, kind)
    said = (asked.stdout or asked.stderr).strip().partition("\n")[0]
    raise LaunchError(
        f"{program} says of its version {said!r}: it is neither Open MPI's nor MPICH's (Hydra); run it "
        "yourself: mpirun OPTIONS python SCRIPT, whose engine finds the other ranks"
    )


def command(library: Library, request: Request) -> tuple[list[str], dict[str, str]]:
    """The words that start the ranks, and the variables that they need in its environment."""
    hosts = ",".join(f"{host}:{ranks}" for host, ranks in request.hosts.items())
    words = [library.mpirun, "-n", str(sum(request.hosts.values()))]
    variables = dict(request.variables)
    elsewhere = not all(map(is_this_machine, request.hosts))
    if library.kind == OPEN_MPI:
        words += ["--host", hosts, "--bind-to", "none"]
        if elsewhere:
            words += ["--mca", "plm_rsh_agent", shlex.join(request.ssh)]
        if request.interface:
            for layer in "btl", "oob":
                words += ["--mca", f"{layer}_tcp_if_include", request.interface]
        words += [word for name in variables for word in ("-x", name)]
    else:
        words += ["-hosts", hosts]
        if elsewhere:
            program, *own = request.ssh
            words += ["-launcher", "ssh", "-launcher-exec", shutil.which(program) or program]
            variables |= {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(own)} if own else {}
        words += ["-iface", request.interface] if request.interface else []
        words += (
            ["-genvlist", ",".join(["PATH", *request.variables])] if request.variables and elsewhere else []
        )
    words += [*request.options, sys.executable, "-m", "polyreme.launch.mpi_rank", *request.command]
    return words, variables


def run(library: Library, request: Request, *, saves: bool = False) -> None:
    """Start the ranks and wait for their end.

    Signals that end a command end them; of a run that `saves`, SIGTERM and SIGUSR1 become SIGUSR1, which
    mpirun passes on; ranks that then end with STOPPED are to go on. Raises RanksFailedError where mpirun ends
    with a status other than 0."""
    words, variables = command(library, request)
    with hearing({*ENDINGS, *(WISHES if saves else ())}) as came:
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            stopped = _wait(process, came, saves)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if stopped is not None:
        raise RanksFailedError(f"stopped by {signal.Signals(stopped).name}; mpirun has ended", 128 + stopped)
    if saves and process.returncode == STOPPED:
        raise RanksFailedError(f"ranks have stopped, and are to go on (status {STOPPED})", STOPPED)
    if process.returncode:
        status = process.returncode if 0 < process.returncode < 128 else 1
        raise RanksFailedError(
            f"mpirun ended with status {process.returncode}: see what ranks print above", status
        )


def _wait(process: subprocess.Popen[bytes], came: list[int], saves: bool) -> int | None:
    """Until it has ended; returns the signal that ended it before its time."""
    stopped, asked_at, deadline = None, 0.0, float("inf")
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        while came:
            number, now = came.pop(0), time.monotonic()
            if saves and number in WISHES and not asked_at:
                asked_at = now
                process.send_signal(signal.SIGUSR1)
            elif not (
                saves and number in WISHES and (number == signal.SIGUSR1 or now < asked_at + ONE_SIGNAL)
            ):
                deadline = now + LEAVING if stopped is None else now
                stopped = stopped or number
                process.send_signal(signal.SIGTERM if number != signal.SIGINT else signal.SIGINT)
    return stopped
