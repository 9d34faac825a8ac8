"""A plain script as a step of a real Slurm on two hosts: its tasks are the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import ALL
from host_training import StandIn, ended, on_one_host, write
from hosts import lacking
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


@pytest.mark.skipif(ALL not in os.environ, reason="starts Python six times; run with --all-cases")
def test_a_batch_script_trains_by_steps_one_after_the_other_and_at_once(
    slurm: Cluster, tmp_path: Path
) -> None:
    import sys

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
