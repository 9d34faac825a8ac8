"""Start ranks by `mpirun` of the MPI library that is found: Open MPI, or MPICH and others with its Hydra.

`command` builds the command line, and `run` starts it. Each process becomes `python COMMAND` through
`polyreme.launch.mpi_rank`, whose engine finds the other ranks.
Communication: none of ours."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyreme.errors import LaunchError
from polyreme.launch.command import Command
from polyreme.launch.hostfile import Active, ResourceError, find_login, is_this_machine
from polyreme.launch.options import LaunchOptions

OPEN_MPI, HYDRA = "Open MPI", "MPICH"
SEARCHED = ("PATH", "LD_LIBRARY_PATH")
"""Variables by which an MPI library that a module has loaded is found."""


@dataclass(frozen=True)
class Library:
    """An MPI library: its mpirun, and whose options that takes (OPEN_MPI or HYDRA)."""

    mpirun: str
    kind: str


@dataclass(frozen=True)
class Request:
    """A request to run `python COMMAND` on the ranks of `hosts` ({name: ranks}).

    `variables` are set for all ranks. `ssh` reaches other hosts, over `interface` if it is given. `options`
    are added to mpirun's own."""

    command: Sequence[str]
    hosts: Mapping[str, int]
    variables: Mapping[str, str]
    ssh: Sequence[str] = ("ssh",)
    interface: str | None = None
    options: Sequence[str] = ()


def find() -> Library:
    """Return the library beside this Python, or else the first one on PATH.

    Raises LaunchError where there is none, or none whose options are known."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        raise LaunchError(
            "--mpi runs mpirun, which is not on PATH; pip install mpich mpi4py, or load a module"
        )
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    kinds = {"Open MPI": OPEN_MPI, "OpenRTE": OPEN_MPI, "HYDRA": HYDRA, "Intel(R) MPI": HYDRA}
    for mark, kind in kinds.items():
        if mark in asked.stdout:
            return Library(program, kind)
    said = (asked.stdout or asked.stderr).strip().partition("\n")[0]
    raise LaunchError(
        f"{program} says of its version {said!r}: it is neither Open MPI's nor MPICH's (Hydra); run it "
        "yourself: mpirun OPTIONS python SCRIPT, whose engine finds the other ranks"
    )


def ranks_of(active: Active) -> dict[str, int]:
    """Return how many ranks each host has. Raises ResourceError for slots that mpirun cannot choose, and for
    IPv6 addresses."""
    uneven = [host for host, slots in active.items() if list(slots) != list(range(len(slots)))]
    if uneven:
        raise ResourceError(
            f"mpirun does not choose slots, and of {uneven[0]} others than the first are asked for; "
            "have ranks started over ssh, without MPI"
        )
    if numbers := [host for host in active if ":" in host]:
        raise ResourceError(
            f"mpirun takes {numbers[0]} for a host and its ranks; give it a name, in DNS or /etc/hosts"
        )
    return {host: len(slots) for host, slots in active.items()}


def command(library: Library, request: Request) -> tuple[list[str], dict[str, str]]:
    """Return the words that start the ranks, and the variables for their environment."""
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
        if request.variables and elsewhere:
            words += ["-genvlist", ",".join([*SEARCHED, *request.variables])]
    words += [*request.options, sys.executable, "-m", "polyreme.launch.mpi_rank", *request.command]
    return words, variables


def shown(library: Library, request: Request) -> str:
    """Return the command as a shell takes it, with the variables that mpirun itself reads, but without those
    of the ranks, which may be secret."""
    words, variables = command(library, request)
    own = [
        f"{name}={shlex.quote(value)}" for name, value in variables.items() if name not in request.variables
    ]
    return " ".join([*own, shlex.join(words)])


def run(
    library: Library, request: Request, *, saves: bool = False, interrupt_saves: bool = False
) -> signal.Signals | None:
    """Start the ranks and wait for their end.

    Signals are passed on, errors raised, and a signal returned, as `Transport.run` says. Raises ResourceError
    where the program that logs in is missing."""
    find_login(request.hosts, request.ssh)
    words, variables = command(library, request)
    if not sys.stdout.isatty():  # Open MPI gives ranks a terminal of its own making
        variables["TERM"] = "dumb"
    ranks = sum(request.hosts.values())
    save_signals = LaunchOptions(interrupt_saves=interrupt_saves).save_signals if saves else ()
    return Command("mpirun", words, variables, ranks=ranks, saves=saves).run(save_signals)
