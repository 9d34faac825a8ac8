"""Has the ranks of several hosts started, as DeepSpeed's command asks for it: over ssh, by mpirun, or by
srun.

What starts them is `polyreme.launch`. Communication: none of ours."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from shlex import split

from polyreme.compat import finder
from polyreme.compat.deepspeed.launcher import launch
from polyreme.compat.deepspeed.launcher.constants import (
    CROSS_RANK,
    CROSS_SIZE,
    ENVIRONMENT_FILE,
    LOCAL_SIZE,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    SLURM_LAUNCHER,
)
from polyreme.compat.deepspeed.launcher.multinode_runner import SlurmRunner
from polyreme.compat.deepspeed.launcher.resources import Active, ResourceError, encode_world_info, logger
from polyreme.distributed.environment import MASTER_ADDR, MASTER_PORT
from polyreme.launch import mpirun, several
from polyreme.launch.command import Command
from polyreme.launch.cores import PIN
from polyreme.launch.manner import Manner

EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""How variables begin that DeepSpeed gives all hosts."""
_OF_SSH = "PDSH_SSH_ARGS_APPEND"


def start(options: argparse.Namespace, active: Active) -> None:
    """Run the script of `runner.parse_args` on the slots of `active`, and wait for its end.

    Raises ResourceError for options that the launcher cannot do, LaunchError where hosts cannot be reached,
    RanksFailedError when a rank fails."""
    launcher = options.launcher.lower()
    if launcher == PDSH_LAUNCHER:
        _over_ssh(options, active)
        return
    _refuse_of_pdsh(options, launcher)
    command = launch.words(options.module, options.user_script, options.user_args)
    # ranks of MPI and Slurm say themselves where they meet, unless it is said here
    address = {MASTER_ADDR: options.master_addr, MASTER_PORT: str(options.master_port)}
    given = {**variables(), **(address if options.master_addr else {})}
    with launch.pid_file(os.getpid() if options.save_pid else 0):
        if launcher == SLURM_LAUNCHER:
            _by_srun(options, active, given)
        else:
            _by_mpirun(options, active, command, given)


def variables() -> dict[str, str]:
    """The variables that ranks on all hosts get: those that DeepSpeed gives them or `polyreme launch` does,
    those in the files .deepspeed_env of the home folder and of this one, and the door's."""
    found = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    found |= several.forwarded()
    for folder in (Path.home(), Path()):
        if (file := folder / ENVIRONMENT_FILE).is_file():
            logger.info("variables for all ranks are read from %s", file)
            found |= _read(file)
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [found.get("PYTHONPATH")])])
    return {**found, **finder.variables("deepspeed", {**os.environ, **found, "PYTHONPATH": path})}


def _read(file: Path) -> dict[str, str]:
    """The lines NAME=VALUE of a file. Raises ResourceError for another one."""
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
            f"itself; give options of ssh in ~/.ssh/config or in the variable {_OF_SSH}"
        )
    if options.bind_core_list is not None:
        raise ResourceError(
            "--bind_core_list names cores of one host; leave it out: on each host, ranks share all cores"
        )
    if options.module and options.no_python:
        raise ResourceError(launch.MODULE_OR_PROGRAM)
    places = {
        host: {CROSS_RANK: str(index), CROSS_SIZE: str(len(active)), LOCAL_SIZE: str(len(slots))}
        for index, (host, slots) in enumerate(active.items())
    }
    what = several.RankCommand(
        launch.words(options.module, options.user_script, options.user_args),
        manner=Manner(
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
    return ["ssh", *split(os.environ.get(_OF_SSH, "")), *port]


def _refuse_of_pdsh(options: argparse.Namespace, launcher: str) -> None:
    """Raise ResourceError for options that mpirun and srun have no place for."""
    said = {
        "--venv_script": options.venv_script is not None,
        "--enable_each_rank_log": options.enable_each_rank_log != "None",
        "--bind_cores_to_rank": options.bind_cores_to_rank,
        "--bind_core_list": options.bind_core_list is not None,
    }
    if refused := [name for name, given in said.items() if given]:
        raise ResourceError(
            f"{', '.join(refused)} with --launcher {launcher}: give the launcher's own options with "
            "--launcher_args, or leave --launcher out"
        )


def _by_mpirun(
    options: argparse.Namespace, active: Active, command: list[str], given: Mapping[str, str]
) -> None:
    if options.no_python:
        raise ResourceError(
            f"--no_python with --launcher {options.launcher}: ranks of MPI are Python's; leave --launcher out"
        )
    library = mpirun.find()
    kind = mpirun.OPEN_MPI if options.launcher.lower() == OPENMPI_LAUNCHER else mpirun.HYDRA
    if library.kind != kind:
        raise ResourceError(
            f"--launcher {options.launcher}, but {library.mpirun} is {library.kind}'s; put the other one "
            "first on PATH, or give the --launcher of this one"
        )
    request = mpirun.Request(
        command, mpirun.ranks_of(active), given, _ssh(options), options=split(options.launcher_args)
    )
    mpirun.run(library, request)


def _by_srun(options: argparse.Namespace, active: Active, given: Mapping[str, str]) -> None:
    if shutil.which("srun") is None:
        raise ResourceError("--launcher slurm runs srun, which is not on PATH: leave --launcher out")
    pool = {host: len(slots) for host, slots in active.items()}
    # which hands on all variables that it has
    words = SlurmRunner(options, encode_world_info(active), pool).get_cmd({}, active)
    logger.debug("srun: %s", words)
    Command("srun", words, given, interrupts=False).run()
