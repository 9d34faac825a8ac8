"""Batch scripts that `polyreme ... --slurm` wrote, under a real Slurm on two hosts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_kubernetes_pods import SCRIPT, STEPS

from command import TINY, polyreme, write_text
from examples import ALL
from hosts import lacking
from slurm import PROGRAMS, Cluster, cluster

pytestmark = pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS))
whole = pytest.mark.skipif(ALL not in os.environ, reason="a minute of processor time: with --all-cases")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(2, tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submitted(slurm: Cluster, folder: Path, *words: str) -> str:
    """The number of a job of two nodes with one rank each, as the command says it."""
    command, *rest = words
    options = ["--slurm", *([] if "--elastic" in rest else ["--nodes", "2"]), "-n", "1"]
    said = slurm.run(sys.executable, "-m", "polyreme", command, *options, *rest, folder=folder)
    assert said.startswith("submitted batch job ") and "2 nodes with 1 rank each" in said  # or "1 to 2"
    return said.split()[3].removesuffix(":")


def ended(slurm: Cluster, job: str) -> dict[str, str]:
    """What Slurm says of a job that has ended."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        told = slurm.run("scontrol", "show", "job", job)
        found = dict(word.split("=", 1) for word in told.split() if "=" in word)
        if found["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL"):
            return found
        time.sleep(0.2)
    raise AssertionError(f"job {job} has not ended:\n{told}")


def test_a_script_on_two_nodes_has_the_weights_of_one_host(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = submitted(slurm, tmp_path, "launch", "script.py", "weights", "$(HOME) '$$")
    printed = tmp_path / f"polyreme-script-{job}.out"
    assert ended(slurm, job)["JobState"] == "COMPLETED", printed.read_text()
    assert sorted(printed.read_text().splitlines()) == [
        "[n2 1] trained rank 1", "n1: rank 0 (srun)", "n2: rank 1 (srun)", "trained rank 0",
    ]  # fmt: skip
    status, _, errors = polyreme(tmp_path, "launch", "-n", "2", "script.py", "alone", "$(HOME) '$$")
    assert status == 0, errors
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "alone").read_bytes()


def go_on(slurm: Cluster, job: str, printed: Path) -> None:
    """Warn a job, as Slurm itself does before the end, and see it go on to its end."""
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.run("bash", "-c", f"until scontrol show job {job} | grep Restarts=1; do sleep 0.2; done")
    # a job that was put into the queue again waits for two minutes, if nobody says otherwise
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    found = ended(slurm, job)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), printed.read_text()


@whole
@pytest.mark.timeout(900)
def test_the_script_of_the_page_saves_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "cluster.md"
    text = "# saves.py\n" + page.read_text("utf-8").partition("# saves.py\n")[2].partition("```")[0]
    told = text.replace("    done = ", "    print(result.step)\n    done = ")
    (tmp_path / "saves.py").write_text(told)
    job = submitted(slurm, tmp_path, "launch", "--saves", "--elastic", "1:2", "saves.py", "3000", "out")
    printed = tmp_path / f"polyreme-saves-{job}.out"
    while not printed.exists() or "\n10\n" not in printed.read_text():
        assert "error" not in (printed.read_text() if printed.exists() else "")
        time.sleep(0.05)
    go_on(slurm, job, printed)
    said = printed.read_text()
    assert said.count("ranks have stopped by SIGUSR1, and are to go on (status 75)") == 2, said
    assert said.count("\n[n2 1] 10\n") == 1 and "\n[n2 1] 3000\n" in said
    status, _, errors = polyreme(tmp_path, "launch", "-n", "2", "saves.py", "3000", "alone")
    assert status == 0, errors
    weights = [tmp_path / each / "model.safetensors" for each in ("out", "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@whole
@pytest.mark.timeout(900)
def test_a_run_that_is_warned_saves_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    write_text(tmp_path)
    text = TINY.replace("length = 20", f"length = {STEPS}")
    (tmp_path / "run.toml").write_text(text.replace("[checkpoint]\n", '[checkpoint]\nfolder = "out"\n'))
    job = submitted(slurm, tmp_path, "train", "--time", "1:00:00", "run.toml")
    log, printed = tmp_path / "out" / "log.jsonl", tmp_path / f"polyreme-run-{job}.out"
    while not log.exists() or log.read_text().count("\n") < 4:
        assert "error" not in (printed.read_text() if printed.exists() else "")
        time.sleep(0.05)
    go_on(slurm, job, printed)
    assert "stopped by SIGUSR1 after step" in printed.read_text()
    status, _, errors = polyreme(
        tmp_path, "train", "run.toml", "-n", "2", "--set", 'checkpoint.folder="alone"'
    )
    assert status == 0, errors
    weights = [tmp_path / each / f"step-{STEPS}" / "model.safetensors" for each in ("out", "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
