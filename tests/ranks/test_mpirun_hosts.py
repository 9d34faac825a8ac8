"""A plain script under mpirun on two hosts, which it reaches by ssh."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_hostfile import processes
from test_launch_unlike_hosts import as_if, bound

import mpirun
from command import until
from examples import whole
from host_training import DIFFERENT, on_one_host, write
from hosts import Host, hosts, lacking
from ssh import PROGRAMS, logins

pytestmark = pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS))


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def login(two: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return login_among(two, tmp_path_factory.mktemp("ssh"))


def login_among(two: list[Host], folder: Path) -> Path:
    """A program that takes a host and a command to run there."""
    program = folder / "login"
    program.write_text(f'#!/bin/sh\nexec {" ".join(logins(two, folder))} "$@"\n')
    program.chmod(0o755)
    return program


def options(library: str, login: Path) -> list[str]:
    """Those of mpirun to start ranks on both hosts."""
    if library.endswith("mpich"):
        return ["-launcher", "ssh", "-launcher-exec", str(login), "-iface", "eth0", "-hosts", "n1,n2"]
    at_start = (
        ["--prtemca", "plm_ssh_agent", str(login), "--prtemca", "prte_if_include", "eth0"]
        if library == "openmpi"
        else ["--mca", "plm_rsh_agent", str(login), "--mca", "oob_tcp_if_include", "eth0"]
    )
    return [*at_start, "--mca", "btl_tcp_if_include", "eth0", "--map-by", "node", "--host", "n1,n2"]


HOLD = """
import os, time
from pathlib import Path
Path("begun" + os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))).touch()
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "library", ["mpich", *(pytest.param(each, marks=whole) for each in mpirun.LIBRARIES if each != "mpich")]
)
def test_a_script_trains_on_two_hosts_to_the_bits_of_one(
    two: list[Host], login: Path, tmp_path: Path, library: str
) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    script = write(tmp_path)
    program, *words = mpirun.command(library, 2, str(script), "3", "60")
    two[0].run(program, *options(library, login), *words)
    lines = [(tmp_path / f"rank-{rank}").read_text().split() for rank in (0, 1)]
    assert [words[:4] for words in lines] == [["rank", str(rank), "of", "2"] for rank in (0, 1)]
    assert {words[5] for words in lines} == {"eth0"}
    assert {words[4] for words in lines} == {on_one_host(script, two[0])}


@whole
@pytest.mark.parametrize("library", mpirun.LIBRARIES)
def test_hosts_with_different_versions_do_not_train(
    two: list[Host], login: Path, tmp_path: Path, library: str
) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    program, *words = mpirun.command(library, 2, str(write(tmp_path)), "3", "60")
    with bound(two[1], *as_if("transformers", "4.0", tmp_path)):
        run = two[0].popen(program, *options(library, login), *words)
        said, _ = run.communicate(timeout=200)
    here = importlib.metadata.version("transformers")
    assert run.returncode and f"{DIFFERENT}transformers {here} on n1, 4.0 on n2; install" in said, said
    print(said)


UNEVEN = """
import hashlib, sys
import torch
import polyreme
torch.manual_seed(0)
zero = {"stage": 3, "shard_over": sys.argv[1]}
loss_fn = torch.nn.functional.cross_entropy
engine = polyreme.initialize(torch.nn.Linear(8, 5), {"batch": {"size": 6}, "zero": zero}, loss_fn=loss_fn)
dp, numbers = engine.mesh.dp, torch.Generator().manual_seed(1)
x, y = torch.randn(6, 8, generator=numbers), torch.randint(5, (6,), generator=numbers)
engine.train_step((x.chunk(dp.size)[dp.rank], y.chunk(dp.size)[dp.rank]))
weights = b"".join(each.numpy().tobytes() for each in engine.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest())
"""


@whole
@pytest.mark.parametrize("library", ["ssh", *mpirun.LIBRARIES])
def test_hosts_may_have_different_numbers_of_ranks(
    two: list[Host], login: Path, tmp_path: Path, library: str
) -> None:
    python = mpirun.LIBRARIES["mpich" if library == "ssh" else library] / "bin" / "python"
    options = []
    if library != "ssh":
        if why := mpirun.missing(library):
            pytest.skip(why)
        options = ["--mpi", "--interface=eth0", *(f"--mpirun={each}" for each in mpirun.OPTIONS[library])]
    (tmp_path / "train.py").write_text(UNEVEN)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=1\n")
    launch = [str(python), "-m", "polyreme", "launch", "--ssh", str(login)]
    hosted = [*launch, "--hostfile", "hosts", *options, "train.py"]
    printed = two[0].run(*hosted, "all", folder=tmp_path)
    alone = two[0].run(*launch[:4], "-n", "3", "train.py", "all", folder=tmp_path)
    found = [set(re.findall("weights .*", each)) for each in (printed, alone)]
    assert found[0] == found[1] and len(found[0]) == 1, printed
    refused = two[0].popen(*hosted, "host", folder=tmp_path)
    printed, _ = refused.communicate(timeout=120)
    assert "in order, 2 on n1, 1 on n2, and each host must have" in printed, printed
    assert refused.returncode == 2
    assert "Traceback" not in printed


@whole
@pytest.mark.parametrize(("library", "named"), [("mpich", "MPI MPICH "), ("openmpi", "MPI Open MPI v")])
def test_doctor_looks_at_both_hosts(two: list[Host], login: Path, library: str, named: str) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    program, *words = mpirun.command(library, 2, "-m", "polyreme", "doctor")
    printed = two[0].run(program, *options(library, login), *words, variables={"COLUMNS": "200"})
    said = re.sub(r"\x1b\[[0-9;]*m", "", printed)  # Open MPI gives ranks a terminal
    for line in (
        "ok    hosts          2, with 2 ranks: n1, n2",
        "ok    interfaces     n1: eth0 10.77.0.1; n2: eth0 10.77.0.2",
        "ok    n1 - n2        ",
    ):
        assert line in said, said
    assert ", mpi4py " in said and named in said, said


STEPS = """
import pathlib, torch, polyreme
config = {"batch": {"size": 4}, "zero": {"stage": 3}, "mesh": {"timeout": 6}}
engine = polyreme.initialize(torch.nn.Linear(8, 64), config, loss_fn=torch.nn.functional.cross_entropy)
while True:
    engine.train_step((torch.randn(2, 8), torch.randint(4, (2,))))
    pathlib.Path(f"begun{engine.mesh.dp.rank}").touch()
"""


@whole
@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_a_host_that_stops_holds_nobody_up(
    two: list[Host], login: Path, tmp_path: Path, library: str
) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    (tmp_path / "train.py").write_text(STEPS)
    (tmp_path / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    own = [f"--mpirun={each}" for each in mpirun.OPTIONS[library]]
    words = ["--mpi", "--hostfile", "hostfile", "--interface", "eth0", "--ssh", str(login), *own, "train.py"]
    python = str(mpirun.LIBRARIES[library] / "bin" / "python")
    run = two[0].popen(python, "-m", "polyreme", "launch", *words, folder=tmp_path)
    until(lambda: len(list(tmp_path.glob("begun*"))) == 2 or run.poll() is not None, "both ranks run")
    inside = ["nsenter", f"--target={two[1].pid}", "--pid", "--mount", "pkill", "-STOP", "-f", "mpi_rank"]
    subprocess.run(inside, check=True)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and "because rank 1 on n2 did not come to it" in said, said
    for host in two:
        until(lambda host=host: not any("train.py" in each for each in processes(host)), "none is left", 15)


@whole
@pytest.mark.parametrize("how", ["killed", "cut off"])
@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_a_host_that_is_lost_holds_nobody_up(tmp_path: Path, library: str, how: str) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    (tmp_path / "train.py").write_text(STEPS)
    (tmp_path / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    with hosts(2) as made:
        own = [f"--mpirun={each}" for each in mpirun.OPTIONS[library]]
        own += ["--ssh", str(login_among(made, tmp_path)), "--interface", "eth0"]
        words = ["--mpi", "--hostfile", "hostfile", *own, "train.py"]
        python = str(mpirun.LIBRARIES[library] / "bin" / "python")
        run = made[0].popen(python, "-m", "polyreme", "launch", *words, folder=tmp_path)
        until(lambda: len(list(tmp_path.glob("begun*"))) == 2 or run.poll() is not None, "both ranks run")
        if how == "killed":
            made[1].end()
        else:
            made[1].link("down")
        said, _ = run.communicate(timeout=60)
        assert run.returncode == 1 and "n2" in said.partition("\n")[2], said
        until(lambda: not any("train.py" in each for each in processes(made[0])), "none is left", 15)


@whole
@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_ctrl_c_ends_both_hosts(two: list[Host], login: Path, tmp_path: Path, library: str) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    own = [f"--mpirun={each}" for each in mpirun.OPTIONS[library]]
    words = ["--mpi", "--hostfile", "hostfile", "--interface", "eth0", "--ssh", str(login), *own, "hold.py"]
    python = str(mpirun.LIBRARIES[library] / "bin" / "python")
    run = two[0].popen(python, "-m", "polyreme", "launch", *words, folder=tmp_path)
    until(lambda: len(list(tmp_path.glob("begun*"))) == 2 or run.poll() is not None, "both ranks run")
    assert run.poll() is None, run.communicate()[0]
    [command] = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    began = time.monotonic()
    os.kill(int(command), signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130 and "error: stopped by SIGINT; mpirun has ended" in said, said
    for host in two:
        until(lambda host=host: not any("hold.py" in each for each in processes(host)), "no rank is left", 15)
    assert time.monotonic() < began + 15
