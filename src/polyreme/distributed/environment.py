"""Which rank this process is, as whoever started it says.

An environment only answers questions (rank, world size, local rank, address): it starts nothing and changes
nothing, after the idea of Lightning Fabric's cluster environments. A new one is a function in `SOURCES`.
Invariants: 0 <= rank < world_size and 0 <= local_rank < local_world_size; a process that something else
started beside others is never taken for a single one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from polyreme.errors import LaunchError

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
"""The names of torchrun's variables, for those who hand them on."""

LAUNCHED = "POLYREME_LAUNCHED"
"""The variable that tells a rank that `polyreme.launch.torchrun` started it, and reports its errors."""


@dataclass(frozen=True)
class Environment:
    """Which rank of the run this process is; `address` is where ranks meet (host, port), None for a single
    process."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, index) < getattr(self, size):
                raise LaunchError(
                    f"{self.name} gave {index} = {getattr(self, index)} with {size} = {getattr(self, size)}, "
                    f"but ranks count from 0 to {size} - 1; start "
                    f"every rank with the same {size} and its own {index}"
                )


def detect(variables: Mapping[str, str] = os.environ) -> Environment:
    """The environment that `variables` describe; a run of one process if no launcher left any.

    Raises LaunchError for variables that are incomplete or contradict each other, and for one of several
    processes of a launcher whose variables do not say where ranks meet."""
    found = (source(variables) for source in SOURCES)
    return next(
        (environment for environment in found if environment), Environment("single process", 0, 1, 0, 1)
    )


def announce(environment: Environment, variables: MutableMapping[str, str] = os.environ) -> None:
    """Write `environment` into the variables of torchrun, which `detect` and torch read."""
    told: dict[str, object] = {
        "RANK": environment.rank,
        "WORLD_SIZE": environment.world_size,
        "LOCAL_RANK": environment.local_rank,
        "LOCAL_WORLD_SIZE": environment.local_world_size,
    }
    if environment.address is not None:
        told |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), environment.address, strict=True))
    variables.update({name: str(value) for name, value in told.items()})


def _torchrun(variables: Mapping[str, str]) -> Environment | None:
    """The variables of torchrun, which `polyreme launch` and people who start ranks by hand set, too."""

    def number(name: str, default: int | None = None) -> int:
        text = variables.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            raise LaunchError(
                f"the variable {name} is {text!r}, but with RANK "
                "and WORLD_SIZE set it must be a whole number; "
                "start ranks with `polyreme launch` or torchrun, "
                "or unset RANK and WORLD_SIZE for a single process"
            ) from None

    if not variables.keys() & {"RANK", "WORLD_SIZE"} or (
        "RANK" not in variables and number("WORLD_SIZE") == 1
    ):
        return None
    for missing, there in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
        if missing not in variables:
            raise LaunchError(
                f"{there} = {variables[there]} is set and {missing} is "
                "not, which does not tell one rank from the others; "
                "start ranks with `polyreme launch` or torchrun, or unset both for a single process"
            )
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    local_world_size = number("LOCAL_WORLD_SIZE", world_size)
    meets = world_size != 1 or "MASTER_PORT" in variables
    if world_size > 1 and "MASTER_ADDR" not in variables:
        raise LaunchError(
            f"RANK = {rank} and WORLD_SIZE = {world_size} are set and "
            "MASTER_ADDR is not, the host of rank 0, where ranks meet; "
            "start ranks with `polyreme launch` or torchrun, or "
            "set MASTER_ADDR (127.0.0.1 on one host) and MASTER_PORT"
        )
    return Environment(
        name="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", rank % max(local_world_size, 1)),
        local_world_size=local_world_size,
        address=(variables.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT")) if meets else None,
    )


@dataclass(frozen=True)
class _Launcher:
    """One that we do not speak yet: its variables, and a command that starts torchrun under it.

    `sizes` are variables of the number of processes, the first that is there counts, and none counts without
    `inside`."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    command: str
    inside: str | None = None


_MEETING = "--nproc-per-node=RANKS --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29400 SCRIPT"
_MPIRUN = f"mpirun -n HOSTS --map-by ppr:1:node torchrun --nnodes=HOSTS {_MEETING}"
_HYDRA = f"mpiexec -n HOSTS -ppn 1 torchrun --nnodes=HOSTS {_MEETING}"
_SRUN = f"srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES {_MEETING}"
_POD = (
    "torchrun --nnodes=PODS --node-rank=$JOB_COMPLETION_INDEX "
    "--master-addr=FIRST_POD --master-port=29400 --nproc-per-node=RANKS SCRIPT"
)

_UNSPOKEN = (
    _Launcher("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), _MPIRUN),
    _Launcher("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), _HYDRA),
    # SLURM_PROCID and SLURM_NTASKS are in a batch script's variables, too, which is one process; those of a
    # step are not
    _Launcher(
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), _SRUN, inside="SLURM_STEP_ID"
    ),
    _Launcher("mpiexec (MPICH, Intel MPI)", "PMI_RANK", ("PMI_SIZE",), _HYDRA),
)
_APART = "for trainings that are meant to be apart, set RANK=0 and WORLD_SIZE=1 in each"


def _unspoken(variables: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that know nothing of each other: each would train by itself, on
    all of the data."""
    for launcher in _UNSPOKEN:
        size = next((name for name in launcher.sizes if name in variables), None)
        if size is None or (launcher.inside is not None and launcher.inside not in variables):
            continue
        if variables[size] != "1":
            raise LaunchError(
                f"{launcher.name} started {variables[size]} processes ({size}), of which this is number "
                f"{variables.get(launcher.rank, 'unknown')} ({launcher.rank}), "
                "but each would train by itself: its variables are not read "
                f"yet; have it start torchrun, once on each host:\n    {launcher.command}\n"
                f"  on one host, `polyreme launch -n RANKS SCRIPT` does without it; {_APART}"
            )
    if (index := variables.get("JOB_COMPLETION_INDEX")) is not None:
        raise LaunchError(
            f"this is pod {index} of an Indexed Job (JOB_COMPLETION_INDEX), "
            "but each pod would train by itself; have torchrun start the "
            f"ranks of each pod, with the pods' number and the name of the first:\n    {_POD}\n  {_APART}"
        )


SOURCES: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (_torchrun, _unspoken)
"""The detectors, in the order in which they are asked."""
