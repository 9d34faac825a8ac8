"""Has the ranks of several hosts started, as DeepSpeed's command asks for it: over ssh, by mpirun, or by
srun.

What starts them is `polyreme.launch`. Communication: none of ours."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import split

from polyreme.compat import finder
from polyreme.compat.deepspeed.launcher import constants, launch
from polyreme.compat.deepspeed.launcher.resources import logger
from polyreme.distributed.environment import MASTER_ADDR, MASTER_PORT
from polyreme.launch import mpirun, several
from polyreme.launch.command import Command
from polyreme.launch.cores import PIN
from polyreme.launch.hostfile import Active, ResourceError
from polyreme.launch.options import LaunchOptions

EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of the names of variables that DeepSpeed gives all hosts."""
OF_SSH = "PDSH_SSH_ARGS_APPEND"


def start(options: argparse.Namespace, active: Active) -> None:
    """Run the script of `runner.parse_args` on the slots of `active`, and wait for its end.

    Raises ResourceError for options that the launcher cannot do, LaunchError where hosts cannot be reached,
    RanksFailedError when a rank fails."""
    if options.module and options.no_python:
        raise ResourceError(launch.MODULE_OR_PROGRAM)
    launcher = options.launcher.lower()
    if launcher == constants.PDSH_LAUNCHER:
        _over_ssh(options, active)
        return
    _refuse_of_pdsh(options, launcher)
    # ranks of MPI and Slurm say themselves where they meet, unless it is said here
    address = {MASTER_ADDR: options.master_addr, MASTER_PORT: str(options.master_port)}
    given = {**variables(), **(address if options.master_addr else {})}
    with launch.pid_file(os.getpid() if options.save_pid else 0):
        if launcher == constants.SLURM_LAUNCHER:
            _by_srun(options, active, given)
        else:
            _by_mpirun(options, active, given)


def variables() -> dict[str, str]:
    """Return the variables that ranks on all hosts get: those that DeepSpeed gives them or `polyreme launch`
    does, those in the files .deepspeed_env of the home folder and of this one, and the door's."""
    found = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    found |= several.forwarded()
    for folder in (Path.home(), Path()):
        if (file := folder / constants.ENVIRONMENT_FILE).is_file():
            logger.info("variables for all ranks are read from %s", file)
            found |= _read(file)
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [found.get("PYTHONPATH")])])
    return {**found, **finder.variables("deepspeed", {**os.environ, **found, "PYTHONPATH": path})}


def _read(file: Path) -> dict[str, str]:
    """Return the lines NAME=VALUE of a file. Raises ResourceError for another one."""
    found = {}
    for line in filter(str.strip, file.read_text("utf-8").splitlines()):
        name, told, value = line.partition("=")
        if not told:
            raise ResourceError(f"{file} has the line {line!r}; write NAME=VALUE, a variable in a line")
        found[name.strip()] = value.strip()
    return found


def _over_ssh(options: argparse.Namespace, active: Active) -> None:
    if options.launcher_args:
        raise ResourceError(
            f"--launcher_args {options.launcher_args!r}: these are pdsh's, and ranks are started over ssh "
            f"itself; give options of ssh in ~/.ssh/config or in the variable {OF_SSH}"
        )
    if options.bind_core_list is not None:
        raise ResourceError(
            "--bind_core_list names cores of one host; leave it out: on each host, ranks share all cores"
        )
    places = {
        host: launch.place(index, len(active), len(slots))
        for index, (host, slots) in enumerate(active.items())
    }
    what = several.RankCommand(
        launch.words(options.module, options.user_script, options.user_args),
        options=LaunchOptions(
            variables={PIN: "1"} if options.bind_cores_to_rank else {},
            ports=launch.ports(options.master_port),
            local_rank=not options.no_local_rank,
            program=options.no_python,
            log=launch.log(options.enable_each_rank_log),
        ),
        files=[] if options.module or options.no_python else [options.user_script],
        variables=variables(),
        of_hosts=places,
        address=options.master_addr or None,
        port=options.master_port,
        source=options.venv_script,
    )
    with launch.pid_file(os.getpid() if options.save_pid else 0):
        several.run(active, what, ssh=_ssh(options))


def _ssh(options: argparse.Namespace) -> list[str]:
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    return ["ssh", *split(os.environ.get(OF_SSH, "")), *port]


def _refuse_of_pdsh(options: argparse.Namespace, launcher: str) -> None:
    """Raise ResourceError for options that mpirun and srun have no place for."""
    names = ("venv_script", "enable_each_rank_log", "bind_cores_to_rank", "bind_core_list")
    said = {f"--{name}": getattr(options, name) for name in names}
    if refused := [name for name, given in said.items() if given not in (None, False, "None")]:
        raise ResourceError(
            f"{', '.join(refused)} with --launcher {launcher}: give the launcher's own options with "
            "--launcher_args, or leave --launcher out"
        )


def mpi_request(
    options: argparse.Namespace, active: Active, given: Mapping[str, str], interface: str | None = None
) -> mpirun.Request:
    """Return what mpirun is asked for. Raises ResourceError for what its ranks cannot be."""
    if options.no_python:
        raise ResourceError(
            f"--no_python with --launcher {options.launcher}: ranks of MPI are Python's; leave --launcher out"
        )
    return mpirun.Request(
        launch.words(options.module, options.user_script, options.user_args),
        mpirun.ranks_of(active),
        given,
        _ssh(options),
        interface,
        split(options.launcher_args),
    )


def _by_mpirun(options: argparse.Namespace, active: Active, given: Mapping[str, str]) -> None:
    request = mpi_request(options, active, given)
    library = mpirun.find()
    kind = mpirun.OPEN_MPI if options.launcher.lower() == constants.OPENMPI_LAUNCHER else mpirun.HYDRA
    if library.kind != kind:
        raise ResourceError(
            f"--launcher {options.launcher}, but {library.mpirun} is {library.kind}'s; put the other one "
            "first on PATH, or give the --launcher of this one"
        )
    mpirun.run(library, request)


def refuse_for_srun(active: Active) -> None:
    """Raise ResourceError for slots that srun, which is told numbers of ranks alone, cannot choose: others
    than the first ones, or more on one host than on another."""
    for host, slots in active.items():
        if sorted(slots) != [*range(len(slots))]:
            raise ResourceError(
                f"--launcher slurm with the slots {slots} of {host}: srun is told how many ranks a host has, "
                "and no specific device ids; take whole hosts, or the first slots of each"
            )
    if len({len(slots) for slots in active.values()}) > 1:
        counts = ", ".join(f"{len(slots)} slots of {host}" for host, slots in active.items())
        raise ResourceError(
            f"--launcher slurm with {counts}: srun needs the same slot count of each; choose as many of all"
        )


def srun_words(options: argparse.Namespace, active: Active) -> list[str]:
    """Return the command that has srun start the ranks of `active`."""
    refuse_for_srun(active)
    chosen = {
        "--nodelist": ",".join(active) if options.include or options.exclude else "",
        # without it srun may leave hosts of the list out
        "--nodes": len(active) if options.include or options.exclude or options.num_nodes > 0 else "",
        "--gpus-per-node": options.num_gpus if options.num_gpus > 0 else "",
    }
    python = [] if options.no_python else [sys.executable, "-u"]
    return [
        *("srun", "-n", str(sum(map(len, active.values()))), *split(options.launcher_args)),
        *(word for name, value in chosen.items() if value for word in (name, str(value))),
        *("--export=ALL", *python),
        *launch.words(options.module, options.user_script, options.user_args),
    ]


def _by_srun(options: argparse.Namespace, active: Active, given: Mapping[str, str]) -> None:
    if shutil.which("srun") is None:
        raise ResourceError("--launcher slurm runs srun, which is not on PATH: leave --launcher out")
    words = srun_words(options, active)  # srun hands on all variables that it has
    logger.debug("srun: %s", words)
    Command("srun", words, given, interrupts=False).run()
