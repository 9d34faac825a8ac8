"""What following a batch job says and prints, with Slurm's commands replaced."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from polyreme.errors import LaunchError
from polyreme.launch import batch_job
from polyreme.launch.batch_job import JobState, follow, read
from polyreme.launch.options import RanksFailedError
from polyreme.launch.requests import STOPPED
from polyreme.launch.slurm import Job

TOLD = """JobId=7 JobName=polyreme-train
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   NodeList={nodes}
   Comment=JobState=FAILED
   WorkDir=/home/me/a JobState=FAILED
   StdErr={output}
   StdIn=/dev/null
   StdOut={output}
"""


class Slurm:
    """Commands that answer from files: what scontrol says, one after the other, and what others were told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._answers = folder, 0
        self.output = folder / "a job-7.out"
        for name, body in {
            "scontrol": f"""cd {folder}; set -- $(ls -v answer-* | head -n 2)
                [ -f do-${{1#*-}} ] && . ./do-${{1#*-}} && rm do-${{1#*-}}
                cat $1; case $(cat $1) in slurm*) code=1;; esac; [ -z "$2" ] || rm $1; exit ${{code:-0}}""",
            "scancel": f'echo "$*" >> {folder}/cancelled',
            "sacct": f"cat {folder}/accounts",
        }.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)

    def says(self, state: str, *, do: str = "", **more: object) -> None:
        """Have scontrol say this next, and run `do` before."""
        words = {"reason": "None", "restarts": 0, "code": "0:0", "nodes": "n[1-2]", "output": self.output}
        self.answers(TOLD.format(state=state, **{**words, **more}), do)

    def answers(self, text: str, do: str = "") -> None:
        self._answers += 1
        (self.folder / f"answer-{self._answers}").write_text(text)
        if do:
            (self.folder / f"do-{self._answers}").write_text(do)

    def prints(self, text: str) -> str:
        """A command that has the job print."""
        return f"printf {text!r} >> '{self.output}'"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, seconds in {"LOOK": 0.01, "SOON": 0.02, "SELDOM": 0.02, "LATE": 0.2}.items():
        monkeypatch.setattr(batch_job, name, seconds)
    monkeypatch.setattr(batch_job.Following, "leaving", 2.0)
    return Slurm(tmp_path)


def test_what_scontrol_tells_is_read() -> None:
    told = TOLD.format(
        state="RUNNING", reason="None", restarts=2, code="9:15", nodes="(null)", output="/a b/%j"
    )
    assert read(told) == JobState("RUNNING", "None", "", 2, 9, 15, Path("/a b/7"))


def test_a_job_is_followed_to_its_end(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    slurm.says("PENDING", reason="Priority", nodes="(null)")
    slurm.says("PENDING", reason="Priority", nodes="(null)")
    slurm.says("RUNNING", do=slurm.prints("one\ntw"))
    slurm.answers("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    slurm.answers("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    slurm.says("COMPLETING", do=slurm.prints("o\n"))
    slurm.says("PENDING", reason="BeginTime", restarts=1)
    slurm.says("RUNNING", restarts=1, nodes="n3", do=slurm.prints("three\n"))
    slurm.says("RUNNING", restarts=1, nodes="n3", do=f"echo 4 > '{slurm.output}'")
    slurm.says("COMPLETED", restarts=1, nodes="n3", do=slurm.prints("5\n"))
    follow(Job("7"))
    output, errors = capfd.readouterr()
    assert output == "one\ntwo\nthree\n4\n5\n"
    assert errors.splitlines() == [
        "job 7: PENDING (Priority)",
        "job 7: RUNNING on n[1-2]",
        "job 7: Slurm does not answer, and is asked again: slurm_load_jobs error: Unable to contact slurm "
        "controller (connect failure)",
        "job 7: PENDING (BeginTime), restart 1",
        "job 7: RUNNING on n3, restart 1",
    ]


@pytest.mark.parametrize(
    ("state", "code", "saves", "status", "said"),
    [
        ("FAILED", "3:0", False, 3, "job 7 ended as FAILED with status 3: see what it printed to /"),
        ("CANCELLED", "0:15", False, 1, "job 7 ended as CANCELLED with signal 15"),
        ("TIMEOUT", "0:0", True, 1, "job 7 ended as TIMEOUT: see"),
        ("FAILED", f"{STOPPED}:0", True, STOPPED, "ranks have stopped, and are to go on (status 75)"),
        ("FAILED", f"{STOPPED}:0", False, STOPPED, "ended as FAILED with status 75"),
    ],
)
def test_how_a_job_ended(slurm: Slurm, state: str, code: str, saves: bool, status: int, said: str) -> None:
    slurm.says(state, code=code, do=slurm.prints("x"))
    with pytest.raises(RanksFailedError, match=re.escape(said)) as caught:
        follow(Job("7"), saves=saves)
    assert caught.value.exit_status == status


def test_a_file_that_is_not_seen(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(40):
        slurm.says("RUNNING")
    slurm.says("COMPLETED")
    follow(Job("7"))
    assert capfd.readouterr().err.count(f"{slurm.output} is not seen here: is its folder one that") == 1


def test_a_job_that_slurm_has_forgotten(slurm: Slurm) -> None:
    slurm.says("RUNNING", do=slurm.prints("x"))
    slurm.answers("slurm_load_jobs error: Invalid job id specified")
    (slurm.folder / "accounts").write_text("COMPLETED|0:0|n[1-2]\n")
    follow(Job("7"))
    slurm.says("RUNNING")
    slurm.answers("slurm_load_jobs error: Invalid job id specified")
    (slurm.folder / "accounts").write_text("CANCELLED by 0|0:9|None assigned\n")
    with pytest.raises(RanksFailedError, match="ended as CANCELLED with signal 9"):
        follow(Job("7"))
    (slurm.folder / "accounts").write_text("Slurm accounting storage is disabled\n")
    with pytest.raises(LaunchError, match=r"say how it ended \(Slurm accounting storage is disabled"):
        follow(Job("7"))


@pytest.mark.parametrize(
    ("number", "saves", "told", "status"),
    [
        (signal.SIGINT, False, ["7"], 130),
        (signal.SIGTERM, False, ["7"], 143),
        (signal.SIGINT, True, ["--signal=HUP 7", "7"], 130),
        (signal.SIGTERM, True, ["--signal=USR1 7"], STOPPED),
        (signal.SIGHUP, True, [], 129),
    ],
)
def test_signals(slurm: Slurm, number: int, saves: bool, told: list[str], status: int) -> None:
    slurm.says("RUNNING", do=slurm.prints("x"))
    slurm.says("RUNNING")
    slurm.says("RUNNING", do=f"kill -{int(number)} $PPID")
    end = {"state": "FAILED", "code": f"{STOPPED}:0"} if status == STOPPED else {"state": "CANCELLED"}
    slurm.says("RUNNING")
    slurm.says("RUNNING")
    slurm.says(**end)
    with pytest.raises(RanksFailedError) as caught:
        follow(Job("7"), saves=saves)
    assert caught.value.exit_status == status
    cancelled = slurm.folder / "cancelled"
    assert (cancelled.read_text().splitlines() if cancelled.exists() else []) == told


def test_a_second_ctrl_c_ends_at_once(slurm: Slurm) -> None:
    slurm.says("RUNNING", do="kill -INT $PPID; sleep 0.1; kill -INT $PPID; sleep 0.1")
    with pytest.raises(
        RanksFailedError, match="stopped by SIGINT; job 7 is cancelled, but has not ended yet"
    ):
        follow(Job("7"))
