"""`polyreme deepspeed --hostfile` on two hosts, the second over a real ssh, by mpirun and by srun."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import mpirun
import slurm
from examples import whole
from hosts import Host, hosts, lacking
from ssh import PROGRAMS, logins

pytestmark = pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS))
# no torch in it: a second less
SHOW = """
import os, socket, sys
names = "RANK LOCAL_RANK CROSS_RANK CROSS_SIZE LOCAL_SIZE MASTER_PORT FROM_FILE SOURCED".split()
print("at", socket.gethostname(), *(os.environ.get(name, "-") for name in names), sys.argv[1:])
"""
TRAIN = """
import argparse
import torch
import deepspeed

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
parser.add_argument("--out")
options = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
engine, *_ = deepspeed.initialize(options, model, config=config)
rank = deepspeed.comm.get_rank()
draw = torch.Generator().manual_seed(rank)
for _ in range(3):
    x = torch.randn(4, 8, generator=draw)
    engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
    engine.step()
assert engine.local_rank == int(__import__("os").environ["LOCAL_RANK"])
norms = [parameter.double().norm().item() for parameter in model.parameters()]
print("norm", rank, "of", deepspeed.comm.get_world_size(), norms)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], str]]:
    """The hosts, and the options of the ssh between them."""
    with hosts(2) as made:
        yield made, " ".join(logins(made, tmp_path_factory.mktemp("ssh"))[1:])


def words(*of_deepspeed: str, python: str | Path = sys.executable) -> list[str]:
    return [str(python), "-m", "polyreme", "deepspeed", *of_deepspeed]


def run(
    two: tuple[list[Host], str], folder: Path, *of_deepspeed: str, python: str = "mpich", **variables: str
) -> str:
    """What the command prints on the first host, by the Python of an MPI library."""
    made, options = two
    if not (folder / "hosts").exists():
        (folder / "hosts").write_text("n1 slots=1\nn2 slots=2\n")
    given: Mapping[str, str] = {"PDSH_SSH_ARGS_APPEND": options, "DS_ACCELERATOR": "cpu", **variables}
    program = mpirun.LIBRARIES[python] / "bin" / "python"
    started = words("--hostfile", "hosts", *of_deepspeed, python=program)
    return made[0].run(*started, folder=folder, variables=given)


def shown(printed: str) -> set[tuple[str, ...]]:
    """Host and variables of each rank that ran SHOW."""
    found = [line[line.index("at n") :].split()[1:] for line in printed.splitlines() if "at n" in line]
    return {tuple(line) for line in found}


@whole
def test_ranks_of_both_hosts(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=f\n\n")
    (tmp_path / "venv").write_text("export SOURCED=s\n")
    options = ["--master_port", "29600", "--venv_script", str(tmp_path / "venv"), "--ssh_port", "22"]
    printed = run(two, tmp_path, *options, "show.py", "--a", "b c")
    assert "n1: rank 0 (this machine)\nn2: ranks 1 to 2 (ssh)" in printed, printed
    assert "3 ranks meet at 10.77.0.1 port 29600" in printed
    given = ("29600", "f", "s")
    assert shown(printed) == {
        ("n1", "0", "0", "0", "2", "1", *given, "['--local_rank=0',", "'--a',", "'b", "c']"),
        ("n2", "1", "0", "1", "2", "2", *given, "['--local_rank=0',", "'--a',", "'b", "c']"),
        ("n2", "2", "1", "1", "2", "2", *given, "['--local_rank=1',", "'--a',", "'b", "c']"),
    }


@whole
def test_one_host_that_a_filter_leaves(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    logs = tmp_path / "logs"
    options = ["--include", "n2:1", "--no_local_rank", "--enable_each_rank_log", str(logs)]
    printed = run(two, tmp_path, *options, "--module", "show", "x")
    assert "n2: rank 0 (ssh)" in printed
    [log] = logs.iterdir()
    assert log.name.endswith("_rank0.log")
    [line] = shown(log.read_text())
    assert line == ("n2", "0", "0", "0", "1", "1", line[6], "-", "-", "['x']")


@whole
def test_a_rank_that_fails_there(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise ValueError('as it was told')\n")
    with pytest.raises(AssertionError, match=r"(?s)on n1: 1\n.*on n2: rank [01] of 2 failed.*as it was told"):
        run(two, tmp_path, "--exclude", "n1", "fail.py")


@whole
def test_training_has_the_numbers_of_one_host(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    printed = run(two, tmp_path, "--num_gpus", "1", "--master_addr", "n1", "train.py", "--out", "x")
    alone = run(two, tmp_path, "--num_nodes", "1", "--num_gpus", "2", "train.py")
    assert norms(printed) == norms(alone) and len(norms(printed)) == 2


STARTS_BY_PDSH = """
import os, subprocess, sys
from deepspeed.launcher.multinode_runner import PDSHRunner
from deepspeed.launcher.runner import encode_world_info, parse_args
hosts = {"n2": [0, 1], "n1": [0]}
pdsh = PDSHRunner(parse_args(sys.argv[1:]), encode_world_info(hosts))
assert pdsh.backend_exists()
pdsh.add_export("FROM_FILE", "f g")
start, end, environment = pdsh.get_cmd(dict(os.environ), hosts)
started = subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True)
for line in started.stdout:
    print(line, end="", flush=True)
    if line.startswith("n1: for ever"):
        subprocess.run(end, env=environment, check=True)
print("ended", started.wait())
"""


@whole
@pytest.mark.skipif(bool(lacking("pdsh")), reason=lacking("pdsh"))
def test_the_command_of_pdsh(two: tuple[list[Host], str], tmp_path: Path) -> None:
    """It starts ranks that get all words as they are, and the other one ends them."""
    (tmp_path / "start.py").write_text(
        "from polyreme.compat import deepspeed\ndeepspeed.install()\n" + STARTS_BY_PDSH
    )
    (tmp_path / "show it.py").write_text(SHOW)
    (tmp_path / "wait.py").write_text("print('for ever', flush=True)\n__import__('time').sleep(1e6)\n")
    given = {"PDSH_SSH_ARGS_APPEND": two[1], "DS_ACCELERATOR": "cpu"}

    def start(*of_runner: str) -> str:
        return two[0][0].run(sys.executable, "start.py", *of_runner, folder=tmp_path, variables=given)

    printed = start("--ssh_port", "22", "show it.py", "b c", "$HOME", "100%n")
    assert printed.endswith("ended 0\n"), printed
    given_words = ("29500", "f", "g", "-", "'b", "c',", "'$HOME',", "'100%n']")
    assert {(*line[:6], *line[6:10], *line[11:]) for line in shown(printed)} == {
        ("n2", "0", "0", "0", "2", "2", *given_words),
        ("n2", "1", "1", "0", "2", "2", *given_words),
        ("n1", "2", "0", "1", "2", "1", *given_words),
    }
    assert "n1: for ever" in (printed := start("wait.py")) and "ended 0" not in printed
    assert "n2: ssh exited" in printed and "n1: ssh exited" in printed, printed
    assert "wait.py" not in "".join(host.run("ps", "-eo", "args") for host in two[0])


@whole
def test_the_command_given_on_each_host(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=2\n")
    options = ["--hostfile", "hosts", "--no_ssh", "--node_rank"]
    second = two[0][1].popen(*words(*options, "1", "show.py"), folder=tmp_path)
    first = two[0][0].run(*words(*options, "0", "show.py"), folder=tmp_path)
    printed, _ = second.communicate(timeout=100)
    assert second.returncode == 0, printed
    assert {line[:5] for line in shown(first + printed)} == {
        ("n1", "0", "0", "0", "2"), ("n2", "1", "0", "1", "2"), ("n2", "2", "1", "1", "2"),
    }  # fmt: skip


def norms(printed: str) -> set[str]:
    return {line[line.index("norm") :] for line in printed.splitlines() if "norm" in line}


@whole
@pytest.mark.parametrize(
    ("launcher", "library", "more"),
    [("MPICH", "mpich", "-iface eth0"), ("openmpi", "system-openmpi", " ".join(mpirun.AS_ROOT))],
)
def test_mpirun(two: tuple[list[Host], str], tmp_path: Path, launcher: str, library: str, more: str) -> None:
    if why := mpirun.missing(library):
        pytest.skip(why)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    options = ["--launcher", launcher, f"--launcher_args={more}"]
    printed = run(two, tmp_path, *options, "train.py", python=library)
    alone = run(two, tmp_path, "--num_nodes", "1", "--num_gpus", "2", "train.py")
    assert norms(printed) == norms(alone) and len(norms(printed)) == 2


@whole
def test_srun(tmp_path: Path) -> None:
    if why := lacking(*slurm.PROGRAMS):
        pytest.skip(why)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    with slurm.cluster(2, tmp_path) as made:
        given = {"DS_ACCELERATOR": "cpu"}
        options = ["--hostfile", "hosts", "--launcher", "slurm", "--launcher_args=--nodes 2"]
        printed = made.run(*words(*options, "train.py"), folder=tmp_path, variables=given)
        alone = made.run(*words("--num_gpus", "2", "train.py"), folder=tmp_path, variables=given)
    assert norms(printed) == norms(alone) and len(norms(printed)) == 2
