"""Finding out which rank this is."""

from __future__ import annotations

import re
import types
from dataclasses import replace

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from polyreme.cli.main import app
from polyreme.distributed import mpi
from polyreme.distributed.environment import BY_MPI, Environment, announce, detect
from polyreme.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Environment("torchrun", 5, 8, 1, 4, ("10.0.0.1", 29400))


def test_an_ipv6_address_may_be_in_brackets() -> None:
    assert detect({**TORCHRUN, "MASTER_ADDR": "[fd00::1]"}).address == ("fd00::1", 29400)
    assert detect({**STEP, "MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "7"}).address == ("fd00::1", 7)


@pytest.mark.parametrize("step", [None, "", "x", "0+1"])
def test_a_step_without_a_number_is_no_training_by_itself(step: str | None) -> None:
    left = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(LaunchError, match="SLURM_STEP_NUM_TASKS '3': a step of so many tasks has a number"):
        detect(left if step is None else {**left, "SLURM_STEP_ID": step})


def test_no_variables_are_a_single_process() -> None:
    assert detect({}) == Environment("single process", 0, 1, 0, 1, None)
    assert detect({"WORLD_SIZE": "1"}).address is None
    # nobody to meet
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == Environment("torchrun", 0, 1, 0, 1, None)


def test_ranks_started_by_hand_on_one_host() -> None:
    found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"})
    assert (found.local_rank, found.local_world_size, found.address) == (1, 2, ("127.0.0.1", 1234))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "8"}, "rank = 8 with world_size = 8"),
        ({"RANK": "-1"}, "rank = -1"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"LOCAL_RANK": "4"}, "local_rank = 4 with local_world_size = 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"MASTER_PORT": "0"}, "port 0 of .*MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "port 65536"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
        ({"LOCAL_WORLD_SIZE": "16"}, "local_world_size = 16 .* world_size = 8"),
        ({"WORLD_SIZE": "0"}, "world_size = 0"),
    ],
)
def test_variables_that_contradict_each_other(change: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        detect({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("MASTER_PORT", "MASTER_PORT is None"),
        ("MASTER_ADDR", "MASTER_ADDR is not, the host of rank 0"),
        ("WORLD_SIZE", "RANK = 5 is set and WORLD_SIZE is not"),
        ("RANK", "WORLD_SIZE = 8 is set and RANK is not"),
    ],
)
def test_a_missing_variable_is_named(missing: str, named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        detect({name: value for name, value in TORCHRUN.items() if name != missing})


OPEN_MPI = {  # as mpirun of Open MPI 5.0.11 sets them
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-a-3144@1",
    "PMIX_RANK": "2",
}
HYDRA = {  # MPICH 5.0.2
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "a",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
}
STEP = {
    **BATCH,
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
PMI2 = {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "12"}
POD = {
    "HOSTNAME": "train-2",
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "POLYREME_PODS": "4",
    "POLYREME_SERVICE": "train",
}
MEETING = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (OPEN_MPI, Environment("mpirun (Open MPI)", 2, 4, 0, 2)),
        (HYDRA, Environment("mpiexec (MPICH, Intel MPI)", 1, 2, 1, 2)),
        (MVAPICH, Environment("mpirun (MVAPICH)", 3, 4, 1, 2)),
        ({**OPEN_MPI, **MEETING}, Environment("mpirun (Open MPI)", 2, 4, 0, 2, ("10.0.0.9", 1234))),
        ({**HYDRA, "MASTER_ADDR": "a"}, Environment("mpiexec (MPICH, Intel MPI)", 1, 2, 1, 2, ("a", 29500))),
        (STEP, Environment("srun (Slurm)", 1, 3, 1, 2, ("n1", 20059))),
        ({**STEP, **PMI2}, Environment("srun (Slurm)", 1, 3, 1, 2, ("n1", 20059))),  # srun --mpi=pmi2
        ({**STEP, "PMIX_RANK": "1"}, Environment("srun (Slurm)", 1, 3, 1, 2, ("n1", 20059))),  # --mpi=pmix
        ({**STEP, **MEETING}, Environment("srun (Slurm)", 1, 3, 1, 2, ("10.0.0.9", 1234))),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "n1"},
            Environment("srun (Slurm)", 1, 3, 1, 3, ("127.0.0.1", 20059)),
        ),
        # mpirun starts its daemons by srun
        ({**STEP, **OPEN_MPI}, Environment("mpirun (Open MPI)", 2, 4, 0, 2)),
        ({**STEP, **HYDRA}, Environment("mpiexec (MPICH, Intel MPI)", 1, 2, 1, 2)),
        ({**STEP, **PMI2, **OPEN_MPI}, Environment("mpirun (Open MPI)", 2, 4, 0, 2)),
        (POD, Environment("Indexed Job (Kubernetes)", 2, 4, 0, 1, ("train-0.train", 29500))),
        (
            {**POD, "HOSTNAME": "set-workers-0-2.train.default"},
            Environment("Indexed Job (Kubernetes)", 2, 4, 0, 1, ("set-workers-0-0.train", 29500)),
        ),
        ({**POD, **MEETING}, Environment("Indexed Job (Kubernetes)", 2, 4, 0, 1, ("10.0.0.9", 1234))),
        ({**POD, **OPEN_MPI}, Environment("mpirun (Open MPI)", 2, 4, 0, 2)),
        ({**POD, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, detect(POD)),
    ],
)
def test_each_launcher_says_which_rank_this_is(variables: dict[str, str], place: Environment) -> None:
    assert detect(variables) == place
    assert detect({**variables, **TORCHRUN}).rank == 5, "torchrun under it"
    assert detect({**variables, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1, "apart"
    announced = {**variables}
    announce(replace(place, address=place.address or ("10.0.0.1", 29400)), announced)
    assert detect(announced).rank == place.rank, "once ranks have met"


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (HYDRA, "PMI_RANK"),
        (HYDRA, "PMI_SIZE"),
        (HYDRA, "MPI_LOCALRANKID"),
        (HYDRA, "MPI_LOCALNRANKS"),
        (MVAPICH, "MV2_COMM_WORLD_SIZE"),
        (STEP, "SLURM_PROCID"),
        (STEP, "SLURM_STEP_NUM_TASKS"),
        (STEP, "SLURM_LOCALID"),
        (STEP, "SLURM_NODEID"),
        (STEP, "SLURM_STEP_TASKS_PER_NODE"),
        (STEP, "SLURM_STEP_NODELIST"),
        (STEP, "SLURM_JOB_ID"),
        (POD, "JOB_COMPLETION_INDEX"),
        (POD, "POLYREME_PODS"),
        (POD, "POLYREME_SERVICE"),
        (POD, "HOSTNAME"),
    ],
)
def test_what_a_launcher_left_out_is_named(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(LaunchError, match=missing):
        detect({name: value for name, value in variables.items() if name != missing})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}, "process 1 of a launcher that speaks PMIx"),
        ({**OPEN_MPI, **HYDRA}, "rank 2 of 4, but mpiexec .* number 1 of 2 .PMI_RANK, PMI_SIZE"),
        ({**HYDRA, "RANK": "0", "WORLD_SIZE": "2", **MEETING}, "torchrun says .* 0 of 2, but mpiexec"),
        ({**STEP, "RANK": "0", "WORLD_SIZE": "2", **MEETING}, "torchrun says .* 0 of 2, but srun"),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, "WORLD_SIZE = 4 is set and RANK is not"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE = 2 is set and WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "variable OMPI_COMM_WORLD_RANK is None"),
        ({"MPI_LOCALNRANKS": "2"}, "variable PMI_RANK is None"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "SLURM_STEP_TASKS_PER_NODE '1.x2"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2,2"}, "variables of two steps are mixed"),
        ({**STEP, "SLURM_NODEID": "2"}, "variables of two steps are mixed"),
        ({**STEP, "SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, "node list is"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2x"}, "tasks on each node are given as '2x'"),
        ({**POD, "POLYREME_RANKS_PER_POD": "2"}, "in each of which 2 ranks train(.|\n)*polyreme launch -n"),
        ({**POD, "HOSTNAME": "node7"}, "HOSTNAME 'node7'"),
        ({**POD, "JOB_COMPLETION_INDEX": "4", "HOSTNAME": "a-4"}, "rank = 4 with world_size = 4"),
    ],
)
def test_what_contradicts_itself_is_refused(variables: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        detect(variables)


def test_mpi_tells_what_a_launcher_that_speaks_pmix_alone_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setattr(mpi, "place", lambda: (1, 4, 1, 2))
    place = detect()
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 4, 1, 2)
    assert place.address is None and place.name in BY_MPI
    monkeypatch.undo()
    monkeypatch.setenv("PMIX_RANK", "1")
    lone = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(size=1, rank=0),
        Get_library_version=lambda: "Some MPI:\t1.2\nof today",
    )
    monkeypatch.setattr(mpi, "library", lambda: lone)
    with pytest.raises(LaunchError, match=r"MPI does not, either \(Some MPI: 1.2 hears nothing"):
        detect()


def test_what_starts_ranks_itself_is_not_started_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["launch", "-n", "2", "script.py"])
    assert result.exit_code == 1
    assert re.search(
        "started 2 processes, of which this is number 1, and each would start ranks", result.output
    )


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI"])
def test_one_process_of_a_launcher_is_a_single_one(name: str) -> None:
    place = detect({f"{name}_SIZE": "1", f"{name}_RANK": "0"})
    assert place.world_size == 1 and place.alone


def test_a_batch_script_of_slurm_is_a_single_process() -> None:
    assert detect(BATCH).world_size == 1
    assert detect({**STEP, "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1, "an interactive step, too"
    assert detect({**STEP, "SLURM_STEP_ID": str(2**32 - 5)}).world_size == 1, "the batch script's own step"


def test_jobs_on_one_node_meet_at_ports_of_their_own() -> None:
    places = [
        detect({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).address
        for job in range(5_000_000, 5_000_100)
        for step in range(8)
    ]
    assert len(set(places)) == len(places)
    assert all(place is not None and 20000 <= place[1] < 30000 for place in places)


def test_who_asks_for_no_backend_is_not_given_mpi() -> None:
    """Accelerate takes MPI for CPU ranks where torch says that it can, whoever started them."""
    assert hasattr(dist.distributed_c10d, "ProcessGroupMPI")
    assert not dist.is_mpi_available()
