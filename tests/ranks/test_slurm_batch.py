"""Batch scripts that `polyreme ... --slurm` wrote, under a real Slurm on two hosts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_kubernetes_pods import SCRIPT, STEPS

from command import TINY, polyreme, until, write_text
from examples import whole
from hosts import lacking
from slurm import PROGRAMS, Cluster, cluster

pytestmark = pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(2, tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submitted(slurm: Cluster, folder: Path, *words: str) -> str:
    """The number of a job of two nodes with one rank each, as the command says it."""
    command, *rest = words
    said = slurm.run(*asking(command, "--detach", *rest), folder=folder)
    assert said.startswith("submitted batch job ") and "2 nodes with 1 rank each" in said  # or "1 to 2"
    return said.split()[3].removesuffix(":")


def asking(command: str, *rest: str) -> list[str]:
    """The words that have a job run on two nodes with one rank each."""
    nodes = [] if "--elastic" in rest else ["--nodes", "2"]
    return [sys.executable, "-m", "polyreme", command, "--slurm", *nodes, "-n", "1", *rest]


class Following:
    """The command, as it follows its job."""

    def __init__(self, slurm: Cluster, folder: Path, *words: str) -> None:
        self._slurm, self._pid, self._printed = slurm, folder / "pid", folder / "printed"
        self._printed.unlink(missing_ok=True)
        shell = f'echo $$ > {self._pid}; exec "$@" > {self._printed} 2>&1'
        self._process = slurm.hosts[0].popen(
            "sh", "-c", shell, "sh", *asking(*words), folder=folder, variables=slurm.variables
        )

    @property
    def printed(self) -> str:
        return self._printed.read_text() if self._printed.exists() else ""

    @property
    def job(self) -> str:
        return self.printed.split()[3].removesuffix(":")

    def until(self, text: str) -> None:
        until(lambda: text in self.printed or self._process.poll() is not None, text)
        assert text in self.printed

    def signal(self, name: str) -> None:
        self._slurm.run("kill", f"-{name}", self._pid.read_text().strip())

    def end(self) -> int:
        return self._process.wait(240)


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if not line.startswith("job "))


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
    said = slurm.run(*asking("launch", "script.py", "weights", "$(HOME) '$$"), folder=tmp_path)
    assert said.startswith("submitted batch job ") and "RUNNING on n[1-2]\n" in said
    job = said.split()[3].removesuffix(":")
    first, _, told = said.partition("Ctrl-C cancels it; --detach only submits\n")
    assert first.endswith(f"it prints to polyreme-script-{job}.out\n")
    assert lines(told) == lines((tmp_path / f"polyreme-script-{job}.out").read_text()) == [
        "[n2 1] trained rank 1", "n1: rank 0 (srun)", "n2: rank 1 (srun)", "trained rank 0",
    ]  # fmt: skip
    status, _, errors = polyreme(tmp_path, "launch", "-n", "2", "script.py", "alone", "$(HOME) '$$")
    assert status == 0, errors
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "alone").read_bytes()


def test_what_no_partition_gives_is_refused_before_it_waits_for_ever(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "none.py").touch()
    small = ("PartitionName=small", "Nodes=ALL", "MaxNodes=1", "MaxTime=1:00:00", "State=UP")
    slurm.run("scontrol", "create", *small)
    words = [sys.executable, "-m", "polyreme", "launch", "--slurm", "--detach"]
    for more, said in {
        ("--nodes", "3"): "--nodes = 3: the partition all never gives a job more than 2 (TotalNodes)",
        (
            "--nodes",
            "2",
            "--partition",
            "small",
        ): "the partition small never gives a job more than 1 (MaxNodes)",
        ("--elastic", "3:4"): "--elastic = 3: the partition all",
        ("--partition", "small", "--time", "2:00:00"): "more than 01:00:00 (MaxTime)",
    }.items():
        refused = slurm.popen(*words, *more, str(tmp_path / "none.py"))
        told, _ = refused.communicate(timeout=60)
        assert refused.returncode == 2 and said in told and "fix: give at most " in told, told
    assert slurm.run("squeue", "--noheader") == ""
    slurm.run("scontrol", "delete", "PartitionName=small")


TOLD = """
import os
print("told", os.environ["RANK"], os.environ["OF_FILE"], os.environ["OF_LINE"], os.environ["OF_SRUN"])
"""


@whole
def test_what_comes_before_srun_and_its_options(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "before.sh").write_text("set -eu\nexport OF_FILE='a file'\n")
    step = ["--srun=--export=ALL,UNUSED=it's", "--srun=env", "--srun=OF_SRUN=a $word"]  # env: as apptainer
    words = ["--prologue", "before.sh", "--setup", 'export OF_LINE="a $OF_FILE"  # it\'s', *step, "told.py"]
    said = slurm.run(*asking("launch", *words), folder=tmp_path)
    for rank in 0, 1:
        assert f"told {rank} a file a a file a $word\n" in said, said
    failing = slurm.hosts[0].popen(
        *asking("launch", "--setup", "module() { return 7; }", "--setup", "module load cuda", "told.py"),
        folder=tmp_path, variables=slurm.variables,
    )  # fmt: skip
    said, _ = failing.communicate(timeout=60)
    assert failing.returncode == 7 and "error: --setup ended with status 7: module load cuda\n" in said, said


WAITS = """
import signal, sys, time
if "saves" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("waits", flush=True)
time.sleep(600)
"""


@whole
@pytest.mark.parametrize("words", [["waits.py"], ["--saves", "waits.py", "saves"]], ids=["plain", "saves"])
def test_ctrl_c_ends_all_nodes(slurm: Cluster, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    following = Following(slurm, tmp_path, "launch", *words)
    following.until("[n2 1] waits")
    began = time.monotonic()
    following.signal("INT")
    assert following.end() == 130
    assert time.monotonic() - began < 15
    assert following.printed.endswith(f"error: stopped by SIGINT; job {following.job} has ended\n")
    told = slurm.run("scontrol", "show", "job", following.job)
    assert "JobState=CANCELLED" in told
    for host in slurm.hosts:
        host.run("sh", "-c", "! grep -l [w]aits.py /proc/[0-9]*/cmdline")


@whole
def test_how_a_job_ends_that_is_followed(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "fails.py").write_text("import sys; sys.exit(7)")
    following = Following(slurm, tmp_path, "launch", "fails.py")
    assert following.end() == 1
    assert "ended as FAILED with status 1: see what it printed to " in following.printed
    following = Following(slurm, tmp_path, "launch", "waits.py")
    following.until("[n2 1] waits")
    following.signal("HUP")
    assert following.end() == 129
    job = following.job
    assert f"the terminal hung up; job {job} goes on: " in following.printed
    assert "JobState=RUNNING" in slurm.run("scontrol", "show", "job", job)
    waiting = Following(slurm, tmp_path, "launch", "--sbatch=--begin=now+1hour", "waits.py")
    waiting.until("PENDING (BeginTime)")
    slurm.run("scancel", waiting.job)
    assert waiting.end() == 1
    assert f"job {waiting.job} ended as CANCELLED" in waiting.printed
    slurm.run("scancel", job)


HANGS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("began", os.getppid(), flush=True)
while sys.argv[1] == "hangs" or os.environ["RANK"] == "0":
    time.sleep(1)
raise ValueError("of its own")
"""


@whole
@pytest.mark.timeout(900)
def test_a_saving_job_ends_where_a_rank_or_a_launcher_of_one_node_does_not_go_on(
    slurm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    following = Following(slurm, tmp_path, "launch", "--saves", "hangs.py", "raises")
    assert following.end() == 1
    why = "every rank here was ended, too: n2: rank 1 of 2 failed first: ValueError: of its own; "
    assert why in following.printed
    following = Following(slurm, tmp_path, "launch", "--saves", "hangs.py", "hangs")
    following.until("[n2 1] began")
    launcher = following.printed.partition("[n2 1] began ")[2].split()[0]
    slurm.hosts[1].run("kill", "-STOP", launcher)
    assert following.end() == 137  # srun kills the one that hangs
    assert "every rank here was ended, too: host 1 of 2, n2, has said nothing for 60 s" in following.printed
    for host in slurm.hosts:
        host.run("sh", "-c", "! grep -l [h]angs.py /proc/[0-9]*/cmdline")


def go_on(slurm: Cluster, job: str, printed: Path) -> None:
    """Warn a job, as Slurm itself does before the end, and see it go on to its end."""
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    waits = "until [[ $(scontrol show job $0) = *JobState=PENDING*Restarts=1* ]]; do sleep 0.2; done"
    slurm.run("bash", "-c", waits, job)
    # A job that was put into the queue again waits for two minutes, if nobody says otherwise. Within the
    # second in which a node revoked its credential it would fail.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    found = ended(slurm, job)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), printed.read_text()


@whole
@pytest.mark.timeout(900)
def test_the_script_of_the_page_saves_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "cluster.md"
    text = "# saves.py\n" + page.read_text("utf-8").partition("# saves.py\n")[2].partition("```")[0]
    told = text.replace("    done = ", "    print(result.step)\n    done = ")
    (tmp_path / "saves.py").write_text(told)
    setup = ("--setup", "echo set up >> setups")
    words = ("launch", "--saves", *setup, "--elastic", "1:2", "saves.py", "3000", "out")
    following = Following(slurm, tmp_path, *words)
    following.until("\n10\n")
    following.signal("USR1")
    assert following.end() == os.EX_TEMPFAIL
    assert following.printed.endswith("error: ranks have stopped, and are to go on (status 75)\n")
    following = Following(slurm, tmp_path, *words)
    following.until("\n[n2 1] ")
    go_on(slurm, following.job, tmp_path / f"polyreme-saves-{following.job}.out")
    assert following.end() == 0
    assert "RUNNING on n[1-2], restart 1\n" in following.printed
    said = (tmp_path / f"polyreme-saves-{following.job}.out").read_text()
    assert lines(said) == lines(following.printed.partition("only submits\n")[2])
    assert said.count("ranks have stopped by SIGUSR1, and are to go on (status 75)") == 2, said
    assert "\n[n2 1] 3000\n" in said
    assert (tmp_path / "setups").read_text() == 3 * "set up\n"
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
