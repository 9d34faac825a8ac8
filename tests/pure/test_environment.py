"""Finding out which rank this is."""

from __future__ import annotations

import re

import pytest
from torch import nn
from typer.testing import CliRunner

import polyreme
from polyreme.cli.main import app
from polyreme.distributed.environment import Environment, detect
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


OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "HYDI_CONTROL_FD": "7"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
POD = {"JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("variables", "found", "way"),
    [
        (
            OPEN_MPI,
            r"mpirun \(Open MPI\) started 4 processes \(OMPI_COMM_WORLD_SIZE\), of which this is number 2",
            "mpirun .*torchrun",
        ),
        (
            {"MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_RANK": "0"},
            "MVAPICH.* started 3 processes",
            "mpiexec .*torchrun",
        ),
        (HYDRA, r"mpiexec .* started 2 processes \(PMI_SIZE\)", "mpiexec .*torchrun"),
        (
            STEP,
            r"srun started 2 processes \(SLURM_STEP_NUM_TASKS\), of which this is number 1 \(SLURM_PROCID\)",
            "srun .*torchrun",
        ),
        ({**BATCH, "SLURM_STEP_ID": "0"}, r"srun started 2 processes \(SLURM_NTASKS\)", "srun .*torchrun"),
        ({**STEP, **HYDRA}, "srun started 2", "srun .*torchrun"),  # srun --mpi=pmi2
        (POD, "this is pod 1 of an Indexed Job", "torchrun .*JOB_COMPLETION_INDEX"),
    ],
)
def test_one_of_several_processes_is_no_single_one(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: str, way: str
) -> None:
    with pytest.raises(LaunchError, match=f"{found}(.|\n)*{way}(.|\n)*RANK=0 and WORLD_SIZE=1"):
        detect(variables)
    assert detect({**variables, **TORCHRUN}).rank == 5, "torchrun under it"
    assert detect({**variables, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1, "apart"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=found):
        polyreme.initialize(nn.Linear(2, 2), {"batch": {"size": 2}})
    for command in (["train", "run.toml"], ["launch", "-n", "2", "script.py"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and re.search(found, result.output) and "torchrun" in result.output, (
            command
        )


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_one_process_of_a_launcher_is_a_single_one(size: str) -> None:
    assert detect({size: "1"}).world_size == 1


def test_a_batch_script_of_slurm_is_a_single_process() -> None:
    assert detect(BATCH).world_size == 1
    assert detect({**STEP, "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1, "an interactive step, too"
