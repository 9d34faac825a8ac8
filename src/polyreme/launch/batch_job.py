"""Follow a batch job of Slurm to its end, as if its ranks ran here.

Invariants: the job's output is printed once, unchanged, also where the job begins again; where this process
ends without a request of the user's to end the job (a hang-up, a closed pipe), the job goes on.
Communication: none. Slurm is asked about the job less and less often, as long as nothing changes."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.errors import LaunchError
from polyreme.launch.frames import OUTPUT, Frame
from polyreme.launch.options import RanksFailedError
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import SAVE_SIGNALS
from polyreme.launch.slurm import Job
from polyreme.launch.streams import Printer
from polyreme.launch.supervise import SupervisedRun, Transport, going_on

LOOK = 0.2  # seconds between two looks at what was printed
SOON, SELDOM = 1.0, 10.0  # seconds between two questions to Slurm, after a change and later
ANSWER = 10.0  # seconds for a command of Slurm's that ends a job, or tells of one that ended
LATE = 15.0  # seconds until a file that another host wrote is seen here
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""Final states of a Slurm job."""
_APART: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
"""How Slurm's commands run: in a session of their own, so that Ctrl-C does not reach them."""


@dataclass(frozen=True)
class JobState:
    """The state of a job, as Slurm reports it. `status` is the exit status of its script, and `number` the
    signal that ended the script, or 0."""

    name: str
    reason: str = "None"
    nodes: str = ""
    restarts: int = 0
    status: int = 0
    number: int = 0
    output: Path | None = None

    @property
    def ended(self) -> bool:
        return self.name in ENDED


def read(text: str) -> JobState:
    """Parse the output of `scontrol show job`."""
    # a name's first value is Slurm's: the user's words come later
    words = dict(reversed([word.split("=", 1) for word in text.split() if "=" in word]))
    output = re.search(r"^\s*StdOut=(/.*)$", text, re.MULTILINE)
    status, _, number = words.get("ExitCode", "0:0").partition(":")
    nodes = words.get("NodeList", "(null)")
    return JobState(
        words["JobState"],
        words.get("Reason", "None"),
        "" if nodes == "(null)" else nodes,
        int(words.get("Restarts", 0)),
        int(status),
        int(number or 0),
        output and Path(output[1].replace("%j", words.get("JobId", "%j"))),
    )


def follow(job: Job, *, saves: bool = False) -> None:
    """Print a job's states and its output, until it has ended.

    Signals that end a command cancel the job, except SIGHUP, after which it goes on; in a run that `saves`,
    SIGTERM and SIGUSR1 are passed on to ranks. Raises RanksFailedError where the job does not end well, or
    after a signal; LaunchError where Slurm does not know how it ended."""
    Following(job, saves).run(SAVE_SIGNALS if saves else ())


class Following(Transport):
    """A job that is followed, and its output."""

    leaving = 14.0
    saving = math.inf  # as long as the nodes' launchers wait
    restarts = True

    def __init__(self, job: Job, saves: bool) -> None:
        self._job, self._saves = job, saves
        self._state = JobState("PENDING")
        self._said: set[str] = set()
        self._printer, self._printed = Printer(), 0
        self._question: subprocess.Popen[bytes] | None = None
        self._next, self._interval = 0.0, SOON
        self._began = math.inf
        """The time when it was first seen to run."""
        self._late = math.inf
        """The time after which no more of its output is waited for."""
        self._cancelled = False

    def start(self, run: SupervisedRun) -> None:
        pass  # Slurm starts them

    def look(self) -> bool:
        seen = self._print()
        if self._state.ended and (seen or not self._state.nodes or time.monotonic() > self._late):
            return True
        if not self._state.ended:
            self._ask()
        time.sleep(LOOK)
        return False

    def save(self, number: int) -> bool:
        if self._state.name == "RUNNING":
            self._cancel("--signal=USR1")  # not to the batch script, which would have the job go on
        return self._state.name == "RUNNING"

    def end(self, number: int | None) -> None:
        if number == signal.SIGHUP:
            text = f"the terminal hung up; job {self._job.number} goes on: {self._state.output}"
            raise RanksFailedError(text, 128 + number)
        self._cancelled, self._next = True, 0.0
        if self._saves:  # it would take Slurm's SIGTERM as the request to save; not after SIGHUP
            self._cancel("--signal=HUP")
        self._cancel()

    def close(self, within: float) -> None:
        if self._question:
            self._question.kill()
            self._question.communicate()

    def _say(self, text: str) -> None:
        """Print a line about the job, once for each of its states."""
        if text not in self._said:
            print(f"job {self._job.number}: {text}", file=sys.stderr, flush=True)
        self._said.add(text)

    def _print(self) -> bool:
        """Print the job's new output. Returns whether its file is there."""
        if self._state.output is None:
            return False
        try:
            with self._state.output.open("rb") as file:  # opened each time: NFS then asks the server
                if file.seek(0, os.SEEK_END) < self._printed:  # it was emptied
                    self._printed = 0
                file.seek(self._printed)
                data = file.read()
        except OSError:
            if time.monotonic() > self._began + LATE:
                self._say(f"{self._state.output} is not seen here: is its folder one that all nodes have?")
            return False
        self._printed += len(data)
        if data:
            self._printer.take(Frame(OUTPUT, 0, data))
        return True

    def _ask(self) -> None:
        """Ask Slurm for the job's state when it is time, and process the answer when it is there."""
        if self._question is None:
            if time.monotonic() >= self._next:
                words = self._job.words("scontrol", "show", "job", self._job.number)
                self._question = subprocess.Popen(words, stdout=subprocess.PIPE, **_APART)
        elif self._question.poll() is not None:  # the pipe holds the whole answer
            answer, self._question = os.fsdecode(self._question.communicate()[0]), None
            self._hear(answer)
            self._next = time.monotonic() + self._interval
            self._interval = SOON if self._cancelled else min(1.1 * self._interval, SELDOM)

    def _hear(self, answer: str) -> None:
        if "JobState=" not in answer and "Invalid job id" not in answer:
            self._say(f"Slurm does not answer, and is asked again: {answer.strip()}")
            return
        before, self._state = self._state, read(answer) if "JobState=" in answer else self._accounted()
        state = self._state
        if (state.name, state.restarts) != (before.name, before.restarts):
            self._interval = SOON
            self._said = self._said if state.ended else set()
            self._late = time.monotonic() + LATE if state.ended else math.inf
        again = f", restart {state.restarts}" if state.restarts else ""
        if state.name == "RUNNING":
            self._began = min(self._began, time.monotonic())
            self._say(f"RUNNING on {state.nodes}{again}")
        elif not state.ended and state.name != "COMPLETING":
            self._say(f"{state.name} ({state.reason}){again}")

    def _accounted(self) -> JobState:
        """Return the end of a job that the controller has forgotten, from the accounting database."""
        form = ["--allocations", "--noheader", "--parsable2", "--format=State,ExitCode,NodeList"]
        answer = _run(self._job.words("sacct", f"--jobs={self._job.number}", *form))
        found = re.match(r"(\w+)[^|]*\|(\d+):(\d+)\|(.*)", answer)
        if found is None or found[1] not in ENDED:
            self._print()
            raise LaunchError(
                f"Slurm does not know job {self._job.number} any more, nor do its accounts say how it ended "
                f"({answer.strip()}); see {self._state.output or 'what it printed'}"
            )
        nodes = "" if found[4] == "None assigned" else found[4]
        return dataclasses.replace(
            self._state, name=found[1], status=int(found[2]), number=int(found[3]), nodes=nodes
        )

    def _cancel(self, *options: str) -> None:
        if said := _run(self._job.words("scancel", *options, self._job.number)).strip():
            self._say(said)

    def stopped(self) -> str:
        more = "has ended" if self._state.ended else "is cancelled, but has not ended yet, as Slurm says"
        return f"job {self._job.number} {more}"

    def failure(self, save_signal: signal.Signals | None) -> RanksFailedError | None:
        state = self._state
        if self._saves and state.status == STOPPED:
            return going_on()
        if state.name == "COMPLETED":
            return None
        how = f"status {state.status}" if state.status else f"signal {state.number}"
        how = f" with {how}" if state.status or state.number else ""
        where = f" to {state.output}" if state.output else ""
        text = f"job {self._job.number} ended as {state.name}{how}: see what it printed{where}"
        return RanksFailedError(text, state.status or 1)


def _run(words: list[str]) -> str:
    """Return the output of a command, or the reason why it does not run."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=ANSWER, check=False, **_APART)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {error}"
    return os.fsdecode(done.stdout)
