"""A plain script as a step of a real Slurm on two hosts: its tasks are the ranks."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_hostfile import HOLD, processes
from test_launch_unlike_hosts import as_if, bound

from command import until
from examples import whole
from host_training import DIFFERENT, StandIn, ended, on_one_host, write
from hosts import TEMPORARY, lacking
from slurm import PROGRAMS, Cluster, cluster

pytestmark = pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(2, tmp_path_factory.mktemp("slurm")) as made:
        yield made


def test_the_tasks_of_a_step_train_together(slurm: Cluster, tmp_path: Path) -> None:
    script, stand_in = write(tmp_path), StandIn(tmp_path)
    step = slurm.popen("srun", "--nodes=2", "--ntasks=2", *stand_in.words)
    apart = ended(stand_in.scripts(2, slurm.hosts, script, "3", "60"))
    stand_in.end()
    assert step.wait(60) == 0
    assert sorted(words[:4] for words in apart) == [["rank", str(rank), "of", "2"] for rank in (0, 1)]
    assert {words[5] for words in apart} == {"eth0"}
    assert {words[4] for words in apart} == {on_one_host(script, slurm.hosts[0])}


@whole
@pytest.mark.parametrize("launch", [[], ["-m", "polyreme", "launch"]], ids=["bare", "launch"])
def test_nodes_with_different_versions_do_not_train(
    slurm: Cluster, tmp_path: Path, launch: list[str]
) -> None:
    script = write(tmp_path)
    with bound(slurm.hosts[1], *as_if("transformers", "4.0", tmp_path)):
        words = ["--nodes=2", "--ntasks-per-node=1", sys.executable, *launch, str(script), "3", "60"]
        step = slurm.popen("srun", *words)
        said, _ = step.communicate(timeout=200)
    here = importlib.metadata.version("transformers")
    assert step.returncode and f"{DIFFERENT}transformers {here} on n1, 4.0 on n2; install" in said, said
    print(said)


@whole
def test_doctor_says_what_the_nodes_lack(slurm: Cluster) -> None:
    doctor = f"ulimit -n 900; exec {sys.executable} -m polyreme doctor"
    step = slurm.popen("srun", "--nodes=2", f"--chdir={TEMPORARY}", "bash", "-c", doctor)  # each has its own
    said = step.communicate(timeout=200)[0]
    assert step.returncode == 1, said
    for line in (
        "ok    hosts          2, with 2 ranks: n1, n2",
        "ok    interfaces     n1: eth0 10.77.0.1; n2: eth0 10.77.0.2",
        f"fail  shared folder  n1: {TEMPORARY} is seen; n2: {TEMPORARY} is not seen; on",
        "fail  file limit     900 open files on each; on n1, n2: too few for connections",
        "ok    n1 - n2        ",
        "error: rank 0 of 2 on n1 failed: 2 of 9 checks failed: see above",
    ):
        assert f"\n{line}" in f"\n{said}", said


@whole
def test_a_batch_script_trains_by_steps_one_after_the_other_and_at_once(
    slurm: Cluster, tmp_path: Path
) -> None:
    script, batch = write(tmp_path), tmp_path / "job.sh"
    train = f"{sys.executable} {script} 2 60"
    batch.write_text(
        f"#!/bin/sh\n#SBATCH --nodes=2 --ntasks=2 --output={tmp_path}/printed\n"
        f"srun --mpi=pmi2 {train} || exit 1\n"
        f"srun --overlap {train} & srun --overlap {train}\nstatus=$?\nwait $! && exit $status\n"
    )
    slurm.run("sbatch", "--wait", str(batch))
    lines = [line.split() for line in (tmp_path / "printed").read_text().splitlines() if line[:4] == "rank"]
    assert len(lines) == 6 and {words[4] for words in lines} == {on_one_host(script, slurm.hosts[0], 2)}


@whole
def test_ctrl_c_twice_ends_the_launchers_of_a_step(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    launch = ["-m", "polyreme", "launch", "-n", "1", "hold.py", "none"]
    step = slurm.popen("srun", "--nodes=2", f"--chdir={tmp_path}", sys.executable, *launch)
    until(lambda: len(list(tmp_path.glob("begun*"))) == 2 or step.poll() is not None, "both ranks run")
    assert step.poll() is None, step.communicate()[0]
    [srun] = Path(f"/proc/{step.pid}/task/{step.pid}/children").read_text().split()
    began = time.monotonic()
    for _ in range(2):  # srun itself wants it twice within a second
        os.kill(int(srun), signal.SIGINT)
        time.sleep(0.2)
    said, _ = step.communicate(timeout=60)
    assert step.returncode and "\n[n2 1] rank 1 of 2 ['none'] None\n" in said, said
    for host in slurm.hosts:
        until(lambda host=host: not any("hold.py" in each for each in processes(host)), "no rank is left", 15)
    assert time.monotonic() < began + 15
