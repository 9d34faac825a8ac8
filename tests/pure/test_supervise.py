"""Another launcher's command, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from polyreme.launch import supervise
from polyreme.launch.requests import FAILED
from polyreme.launch.torchrun import RanksFailedError

FAILS = f"""
import os, sys, time
word = {FAILED.format(3)!r}.encode()
os.write(2, b"an error \\xc3\\xa9\\n" + word[:9])
time.sleep(0.2)
os.write(2, word[9:] + b"more\\n")
"""


def run(*lines: str) -> None:
    supervise.supervise("mpirun", [sys.executable, "-c", "\n".join([FAILS, *lines])], {})


def test_the_status_is_that_of_the_rank_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailedError, match="mpirun ended with status 255") as raised:
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
