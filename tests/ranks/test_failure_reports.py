"""What ranks say that fail, where a launcher that is not ours has started them: a sentence. The traceback is
in a file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpirun
import slurm
from examples import whole
from host_training import by_hand
from hosts import Host, hosts, lacking

SCRIPT = """
import os, signal, sys
import torch
import polyreme

torch.set_num_threads(1)
step = 0

def loss_fn(output, target):
    if step == 3 and engine.mesh.dp.rank == 1:
        if sys.argv[1] == "abort":
            from mpi4py import MPI
            MPI.COMM_WORLD.Abort(5)  # MPICH's may come back before its launcher kills
            signal.pause()
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no good")
    return (output - target).square().mean()

engine = polyreme.initialize(torch.nn.Linear(8, 4), {"batch": {"size": 8}}, loss_fn=loss_fn)
while True:
    step += 1
    engine.train_step((torch.randn(4, 8), torch.randn(4, 4)))
"""
FAILED = (
    r"error: rank 1 of 2 on (\S+) failed: ValueError: no good\n(?:  at \S+/tests/(?:warm|hosts).py:.*\n)*"
    r"  at \S+script.py:23: engine.train_step.*\n"
    r'  at \S+script.py:17: raise ValueError\("no good"\)\n'
    r"traceback: (\S+) on \1\n"
)
HEARD = (
    r"error: rank 0 of 2 on \S+ failed: .* because rank 1 raised ValueError: no good\n  at \S+script.py:23: "
)
ENDED = r"error: rank 0 of 2 on \S+ (was ended by SIGTERM, as MPI does where another rank|failed: ).*\n  at "


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def told(printed: str, folder: Path, both: bool = True) -> None:
    """The rank that failed says why, and the other one if `both`, without a traceback. That is in the only
    file."""
    found = re.search(FAILED, printed)
    assert found and (not both or re.search(HEARD, printed)) and "Traceback" not in printed, printed
    [file] = folder.glob("traceback-*")
    assert found[2] == str(file) and found[1] in file.name
    kept = file.read_text()
    assert kept.startswith("Traceback") and "in loss_fn" in kept and kept.endswith("ValueError: no good\n")


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    if why := lacking():
        pytest.skip(why)
    with hosts(2) as made:
        yield made


def test_ranks_of_two_hosts(two: list[Host], script: Path) -> None:
    runs = [host.script(script, "raise", variables=by_hand(rank, 2, "n1")) for rank, host in enumerate(two)]
    ends = [run.end() for run in runs]
    assert [status for status, _ in ends] == [1, 1]
    told("".join(printed for _, printed in ends), script.parent)
    assert "rank 1 of 2 on n2 failed" in ends[1][1]


@whole
@pytest.mark.skipif(bool(lacking(*slurm.PROGRAMS)), reason=lacking(*slurm.PROGRAMS))
def test_tasks_of_srun(script: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with slurm.cluster(2, tmp_path_factory.mktemp("slurm")) as made:
        words = ["--nodes=2", f"--chdir={script.parent}", sys.executable, str(script), "raise"]
        step = made.popen("srun", "--ntasks-per-node=1", *words)
        printed, _ = step.communicate(timeout=200)
    assert step.returncode
    told(printed, script.parent)
    print(printed)


def by_mpirun(library: str, script: Path, how: str) -> str:
    if why := mpirun.missing(library):
        pytest.skip(why)
    ran = subprocess.run(
        mpirun.command(library, 2, str(script), how), cwd=script.parent, env=mpirun.variables(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200, check=False,
    )  # fmt: skip
    print(ran.stdout)
    assert ran.returncode
    return ran.stdout


@whole
@pytest.mark.parametrize("library", mpirun.LIBRARIES)
def test_ranks_of_mpirun(library: str, script: Path) -> None:
    told(by_mpirun(library, script, "raise"), script.parent, both=False)  # MPI may end rank 0 before


@whole
@pytest.mark.parametrize("how", ["kill", "abort"])
@pytest.mark.parametrize("library", mpirun.LIBRARIES)
def test_who_is_ended_by_mpi_says_so_where_it_can(library: str, how: str, script: Path) -> None:
    printed = by_mpirun(library, script, how)
    assert "Traceback" not in printed and not list(script.parent.glob("traceback-*"))
    if "openmpi" in library:  # MPICH kills at once
        assert re.search(ENDED, printed), printed
