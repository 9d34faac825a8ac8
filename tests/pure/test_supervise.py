"""Another launcher's command, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from polyreme.launch import supervise
from polyreme.launch.manner import RanksFailedError
from polyreme.launch.requests import ENDS, STOPPED

WORD = ENDS.format(3, json.dumps("rank 1 failed: é\n  at x"))
FAILS = f"""
import os, sys, time
word = {WORD!r}.encode()
os.write(2, b"an error \\xc3\\xa9\\n" + word[:9])
time.sleep(0.2)
os.write(2, word[9:] + b"more\\n")
"""


def run(*lines: str) -> None:
    supervise.supervise("mpirun", [sys.executable, "-c", "\n".join([FAILS, *lines])], {})


def test_the_status_is_that_of_the_rank_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        RanksFailedError, match=r"mpirun ended with status 255: rank 1 failed: é\n  at x$"
    ) as raised:
        run("sys.exit(255)")
    assert raised.value.exit_status == 3 and capfd.readouterr().err == "an error é\nmore\n"


@pytest.mark.parametrize("deaf", [False, True])
def test_a_command_that_waits_for_a_host_that_does_not_answer_is_ended(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE", 0.05)
    monkeypatch.setattr(supervise, "LEAVING", 0.3)
    how = "did not end the others" if deaf else "mpirun ended with status -15"
    with pytest.raises(RanksFailedError, match=how) as raised:
        run("import signal", f"signal.signal(signal.SIGTERM, signal.SIG_{'IGN' if deaf else 'DFL'})",
            "time.sleep(1000)")  # fmt: skip
    assert raised.value.exit_status == 3


@pytest.mark.parametrize("ended", [2, 1])
def test_a_command_that_ends_well_before_its_ranks_has_failed(
    ended: int, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ENDS.format(0, '""').encode() * ended
    words = [sys.executable, "-c", f"import os; os.write(2, {said!r})"]
    with contextlib.ExitStack() as held:
        if ended < 2:
            why = "status 0 before 1 of 2 ranks had ended, whose hosts it has lost: see"
            held.enter_context(pytest.raises(RanksFailedError, match=why))
        supervise.supervise("mpirun", words, {}, ranks=2)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("told", "status"), [((STOPPED, STOPPED), STOPPED), ((STOPPED, 3), 3)])
def test_a_run_that_stopped_is_to_go_on_though_the_command_has_lost_the_status(
    told: tuple[int, int], status: int
) -> None:
    """MPICH 4.0.2 has."""
    said = b"".join(ENDS.format(each, '""').encode() for each in told)
    words = [sys.executable, "-c", f"import os; os.write(2, {said!r})"]
    with pytest.raises(RanksFailedError, match="are to go on" if status == STOPPED else "mpirun") as raised:
        supervise.supervise("mpirun", words, {}, saves=True, ranks=2)
    assert raised.value.exit_status == status


def test_the_command_does_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    inner = f"import os, time; open({str(pipe)!r}, 'w').close(); time.sleep(1000)"
    launcher = os.fork()
    if not launcher:
        with contextlib.suppress(BaseException):
            supervise.supervise("mpirun", [sys.executable, "-c", inner], {})
        os._exit(0)
    pipe.open().close()  # it runs
    [command] = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    opened = os.pidfd_open(int(command))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert select.select([opened], [], [], 60)[0]
    os.close(opened)
