"""What a supervisor does at signals and failures; another launcher's command, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyreme.launch.command import Command
from polyreme.launch.options import RanksFailedError
from polyreme.launch.requests import ENDS, STOPPED
from polyreme.launch.signals import SAVE_SIGNALS
from polyreme.launch.supervise import SupervisedRun, Transport

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class Ranks(Transport):
    """Ranks of which something is seen at each look, a second after the last: a signal that comes, one that
    fails, or that all have ended; nothing more in the end."""

    grace, leaving, saving = 2.0, 5.0, 50.0

    def __init__(self, seen: Sequence[object], clock: list[float], can_save: bool = True) -> None:
        self._seen, self._clock, self._can_save = iter(seen), clock, can_save
        self._failing = False
        self.told: list[tuple[str, object, float]] = []

    def start(self, run: SupervisedRun) -> None:
        self._clock[0] = 0.0

    def look(self) -> bool:
        self._clock[0] += 1
        seen = next(self._seen, None)
        for each in seen if isinstance(seen, tuple) else (seen,):
            if isinstance(each, signal.Signals):
                signal.raise_signal(each)
            self._failing = self._failing or each == "fails"
        return seen == "ends" or (isinstance(seen, tuple) and "ends" in seen)

    def failing(self) -> bool:
        return self._failing

    def save(self, number: int) -> bool:
        self.told.append(("save", number, self._clock[0]))
        return self._can_save

    def end(self, number: int | None) -> None:
        self.told.append(("end", number, self._clock[0]))

    def close(self, within: float) -> None:
        self.told.append(("close", within, self._clock[0]))

    def stopped(self) -> str:
        return "so it was"

    def failure(self, save_signal: signal.Signals | None) -> RanksFailedError | None:
        return RanksFailedError("rank 1 failed", 7) if self._failing else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seen", "told", "outcome"),
    [
        (["ends"], [], None),
        ([TERM, "ends"], [("save", TERM, 1)], TERM),
        ([USR1, TERM, None, USR1, "ends"], [("save", USR1, 1)], USR1),
        ([TERM, TERM, "ends"], [("save", TERM, 1)], TERM),  # several processes may send it
        ([TERM, None, None, TERM, "ends"], [("save", TERM, 1), ("end", TERM, 4)], "SIGTERM; so it was"),
        ([TERM, INT, "ends"], [("save", TERM, 1), ("end", INT, 2)], "SIGINT; so it was"),
        ([INT, "ends"], [("end", INT, 1)], "SIGINT; so it was"),
        ([HUP], [("end", HUP, 1), ("close", 0, 6)], "SIGHUP; so it was"),
        ([INT, TERM], [("end", INT, 1), ("close", 0, 2)], "SIGINT; so it was"),
        # a signal that has come to the ranks, too
        ([(INT, "fails", "ends")], [("end", INT, 1)], "SIGINT; so it was"),
        ([(TERM, "ends")], [("save", TERM, 1)], TERM),
        (["fails", "ends"], [], "rank 1 failed"),
        (["fails"], [("end", None, 3), ("close", 0, 8)], "rank 1 failed"),
        (["fails", None, None, INT, "ends"], [("end", None, 3), ("end", INT, 4)], "SIGINT; so it was"),
        ([USR1], [("save", USR1, 1), ("close", 0, 52)], "SIGUSR1; its ranks had not saved and ended 50 s"),
    ],
)
def test_what_becomes_of_signals_and_failures(
    clock: list[float], seen: list[object], told: list[tuple[str, object, float]], outcome: object
) -> None:
    ranks = Ranks(seen, clock)
    if isinstance(outcome, str):
        with pytest.raises(RanksFailedError) as raised:
            ranks.run(SAVE_SIGNALS)
        assert outcome in str(raised.value)
        number = next((each for each in signal.Signals if f"by {each.name};" in str(raised.value)), None)
        assert raised.value.exit_status == (7 if number is None else 128 + number)
    else:
        assert ranks.run(SAVE_SIGNALS) == outcome
    closed = "close" in {what for what, _, _ in told}
    assert (ranks.told if closed else ranks.told[:-1]) == told and ranks.told[-1][0] == "close"


@pytest.mark.parametrize("running", [True, False])
def test_ranks_that_may_have_begun_again_are_asked_again(clock: list[float], running: bool) -> None:
    """And nothing is ended if they run no more."""

    class Requeued(Ranks):
        restarts = True

        def save(self, number: int) -> bool:
            return super().save(number) and (running or clock[0] < 2)

    ranks = Requeued([USR1, None, None, USR1, "ends"], clock)
    assert ranks.run((TERM, USR1)) == USR1
    assert [each[::2] for each in ranks.told] == [("save", 1), ("save", 4), ("close", 5)]


def test_a_wish_that_nobody_can_hear_ends_the_run(clock: list[float]) -> None:
    ranks = Ranks([TERM, "ends"], clock, can_save=False)
    with pytest.raises(RanksFailedError, match="stopped by SIGTERM; so it was"):
        ranks.run(SAVE_SIGNALS)
    assert [what for what, _, _ in ranks.told] == ["save", "end", "close"]


def test_a_signal_ends_what_waits_before_ranks_begin() -> None:
    class Waits(Ranks):
        def start(self, run: SupervisedRun) -> None:
            with run.interruptible():
                signal.raise_signal(INT)
            pytest.fail("it was not interrupted")

    ranks = Waits([], [0.0])
    with pytest.raises(RanksFailedError, match="stopped by SIGINT; so it was") as raised:
        ranks.run()
    assert raised.value.exit_status == 130 and [what for what, _, _ in ranks.told] == ["close"]


WORD = ENDS.format(3, json.dumps("rank 1 failed: é\n  at x"))
FAILS = f"""
import os, sys, time
word = {WORD!r}.encode()
os.write(2, b"an error \\xc3\\xa9\\n" + word[:9])
time.sleep(0.2)
os.write(2, word[9:] + b"more\\n")
"""


def run(*lines: str, before: str = "") -> None:
    Command("mpirun", [sys.executable, "-c", "\n".join([before, FAILS, *lines])], {}).run()


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
    monkeypatch.setattr(Command, "grace", 0.05)
    monkeypatch.setattr(Command, "leaving", 0.3)
    how = "did not end the others" if deaf else "mpirun ended with status -15"
    with pytest.raises(RanksFailedError, match=how) as raised:
        run("time.sleep(1000)", before="import signal; signal.signal(15, signal.SIG_IGN)" if deaf else "")
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
        Command("mpirun", words, {}, ranks=2).run()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("told", "status"), [((STOPPED, STOPPED), STOPPED), ((STOPPED, 3), 3)])
def test_a_run_that_stopped_is_to_go_on_though_the_command_has_lost_the_status(
    told: tuple[int, int], status: int
) -> None:
    """MPICH 4.0.2 has."""
    said = b"".join(ENDS.format(each, '""').encode() for each in told)
    words = [sys.executable, "-c", f"import os; os.write(2, {said!r})"]
    with pytest.raises(RanksFailedError, match="are to go on" if status == STOPPED else "mpirun") as raised:
        Command("mpirun", words, {}, ranks=2, saves=True).run(SAVE_SIGNALS)
    assert raised.value.exit_status == status


def test_the_command_does_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    inner = f"import os, time; open({str(pipe)!r}, 'w').close(); time.sleep(1000)"
    launcher = os.fork()
    if not launcher:
        with contextlib.suppress(BaseException):
            Command("mpirun", [sys.executable, "-c", inner], {}).run()
        os._exit(0)
    pipe.open().close()  # it runs
    [command] = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    opened = os.pidfd_open(int(command))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert select.select([opened], [], [], 60)[0]
    os.close(opened)
