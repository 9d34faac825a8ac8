"""The ranks of this host: their processes, which of them failed first and why, and what launchers on other
hosts report of theirs.

Invariants: every rank is in a session of its own, with what it starts, and has ended when `Local` is closed.
Communication: where launchers of several hosts meet (`hosts`), and what they report to each other
(`peers`)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from polyreme.distributed.failure import keep
from polyreme.errors import ConfigError, LaunchError
from polyreme.files.machine import killed_for_memory
from polyreme.launch.frames import ERRORS, OUTPUT
from polyreme.launch.hosts import Place
from polyreme.launch.options import PATIENCE, LaunchOptions, RanksFailedError
from polyreme.launch.peers import LINGER, Peers
from polyreme.launch.processes import signal_group
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import acknowledge, listens
from polyreme.launch.streams import Pipes
from polyreme.launch.supervise import SupervisedRun, Transport, going_on, stopped_by

POLL = 0.1  # seconds between looks at the ranks
KILLED = "was ended by SIGKILL"
SHOWN = 3  # later failures whose reason a report gives


class Local(Transport):
    """A process for each of `commands`, with `variables` in addition to a rank's own. Error files go to
    `folder`. `meet` joins the other hosts, given the number of ranks here. `save_signals` ask ranks to save.
    `failing` is called at the first failure, as `polyreme.launch.torchrun.launch` says."""

    leaving = PATIENCE

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        variables: Mapping[str, str],
        folder: Path,
        meet: Callable[[int], Place],
        options: LaunchOptions,
        save_signals: Collection[int],
        failing: Callable[[bool], None] | None,
    ) -> None:
        self._commands, self._variables = commands, variables
        self._meet, self._options, self._save_signals, self._tell = meet, options, save_signals, failing
        self._errors = [folder / str(local) / "error.json" for local in range(len(commands))]
        self._processes: list[Popen[bytes]] = []
        self._ending = self._failing = False
        self._first: Collection[int] = ()  # ranks that had ended badly when a failure was first seen
        self._good = (None, 0, *([STOPPED] if save_signals else []))  # how a rank may have ended
        self._printed = None if options.take is None else Pipes(options.take)
        self._kills = killed_for_memory()
        self._peers: Peers | None = None

    def start(self, run: SupervisedRun) -> None:
        self._run = run
        with run.interruptible():
            self._place = place = self._meet(ranks := len(self._commands))
        self._peers = place.peers
        if self._options.begun is not None:
            self._options.begun(place.first, ranks)
        # ranks that still import would print tracebacks at Ctrl-C
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for local, (command, errors) in enumerate(zip(self._commands, self._errors, strict=True)):
                errors.parent.mkdir()
                own = _variables(place, local, ranks, errors)
                variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **self._variables, **own}
                words = [sys.executable, "-m", "polyreme.launch.rank", str(os.getpid()), *command]
                ends = self._outputs(place.first + local)
                output, to = (ends[0], ends[-1]) if ends else (None, None)
                self._processes.append(
                    Popen(words, env=variables, stdout=output, stderr=to, start_new_session=True)
                )
                for each in ends:
                    os.close(each)
        except (LaunchError, OSError) as error:
            if place.peers is not None:
                place.peers.fail(str(error))
                place.peers.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if self._printed is not None:
            self._printed.start()

    def look(self) -> bool:
        time.sleep(POLL)
        if not self._ending:
            self._find_failure()
        if self._running():
            if self._save_signals and not self._ending and self._place.somebody_waits():
                self._run.ask(signal.SIGUSR1)
            return False
        peers = self._peers
        if peers is None or self._ending or self._failing:
            return True
        return peers.leave(POLL) is not None or peers.left

    def failing(self) -> bool:
        return self._failing

    def save(self, number: int) -> bool:
        if self._options.interrupt_saves and any(listens(each.pid) for each in self._processes):
            acknowledge(number)  # otherwise the signal ends them: no step has begun, or all is saved
        for process in self._processes:
            process.send_signal(number)  # to the rank alone: what it started would not save, but end
        return True

    def end(self, number: int | None) -> None:
        """End the ranks by a signal. A signal that asked them to save is followed by SIGKILL, as they would
        take it as the first again."""
        self._ending = True
        how = signal.SIGKILL if number in self._save_signals else number or signal.SIGTERM
        _signal(self._processes if number is None else self._running(), how)

    def close(self, within: float) -> None:
        _signal(self._processes if self._failing else self._running(), signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(TimeoutExpired):  # it hangs in a file system or a device
                process.wait(PATIENCE)
        if self._printed is not None:
            self._printed.close()

    def stopped(self) -> str:
        return "every rank has ended"

    def failure(self, save_signal: signal.Signals | None) -> RanksFailedError | None:
        first = self._place.first
        # one that has not ended yet was sent SIGKILL
        codes = {
            first + local: -signal.SIGKILL if process.returncode is None else process.returncode
            for local, process in enumerate(self._processes)
        }
        if any(code not in self._good for code in codes.values()):
            ends = {-codes[rank] if codes[rank] < 0 else codes[rank] - 128 for rank in self._first}
            if save_signal is not None and ends == {save_signal}:
                return stopped_by(save_signal, self.stopped())
            failures = [
                Failure.read(rank, code, self._errors[rank - first]) for rank, code in codes.items() if code
            ]
            lacks_memory = self._kills is not None and (killed_for_memory() or 0) > self._kills
            return report(failures, self._first, self._place.world_size, lacks_memory)
        if STOPPED in codes.values():
            return going_on(" by themselves" if save_signal is None else f" by {save_signal.name}")
        return None

    def agree(self, error: RanksFailedError | None) -> RanksFailedError | None:
        """Return what ended the ranks of all hosts, once they have ended: `error`, or what another host
        reported before."""
        peers = self._peers
        if error is not None and self._processes:
            error.ended_well = not any(each.returncode for each in self._processes)
        if peers is None:
            return error
        if error is not None and error.exit_status != STOPPED:
            first, *lines = str(error).splitlines()
            more = [each.strip() for each in lines if each.startswith(("  at ", "traceback: "))] or lines[-1:]
            peers.fail("; ".join([first, *more]), error.exit_status)
            if error.rank is not None:
                text, lacked = f"on {socket.gethostname()}: {error}", error.out_of_memory
                error = RanksFailedError(text, error.exit_status, error.rank, error.traceback)
                error.out_of_memory = lacked
        if peers.failure() is not None:
            with contextlib.suppress(RanksFailedError), self._run.interruptible():
                peers.leave(LINGER)
        ending = peers.elsewhere()
        peers.close()
        if ending is None:
            return error
        return RanksFailedError(f"every rank here was ended, too: {ending.text}", ending.status)

    def _outputs(self, rank: int) -> list[int]:
        """Return the file descriptors for a rank's stdout and stderr; empty where it inherits this process'
        own."""
        if self._printed is not None and self._options.log is None:
            return [self._printed.open(rank, OUTPUT), self._printed.open(rank, ERRORS)]
        if self._options.log is None:
            return []
        path = Path(f"{self._options.log}{rank}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise LaunchError(f"{path} cannot be written to: {error.strerror}") from None
        return [file]

    def _running(self) -> list[Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _find_failure(self) -> None:
        # A rank that raised waits (see polyreme.launch.rank): one that ended did so by itself, not for its
        # peer.
        raised = [errors.exists() for errors in self._errors]
        # perhaps as a dying peer closed its connections: wait until that one has ended, too
        if any(raised):
            time.sleep(POLL)
        first = self._place.first
        self._first = [first + at for at, each in enumerate(self._processes) if each.poll() not in self._good]
        peers = self._peers
        if not (any(raised) or self._first or (peers is not None and peers.failure() is not None)):
            return
        self._failing = True
        if self._tell is not None:
            self._tell(bool(self._first))
        if peers is not None:
            if not self._first:  # it may have lost a rank of another host, whose report comes
                peers.failure(5 * POLL)
            peers.fail("a rank has failed")
        if self._save_signals:  # SIGTERM would have them go on to the end of their step, which will not come
            others = zip(self._processes, raised, strict=True)
            _signal([process for process, its in others if not its], signal.SIGKILL)


def _signal(processes: Iterable[Popen[bytes]], number: int) -> None:
    """Send a signal to ranks and all that they started."""
    for process in processes:
        signal_group(process.pid, number)


def _variables(place: Place, local: int, ranks: int, errors: Path) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    rank, world_size = str(place.first + local), str(place.world_size)
    return {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(place.index), "GROUP_WORLD_SIZE": str(place.count),
        "ROLE_NAME": "rank", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.address[0], "MASTER_PORT": str(place.address[1]),
        "TORCHELASTIC_RUN_ID": place.run_id, "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(errors), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """The failure of one rank. `at` is when it raised, in seconds, or infinity if it left no error file."""

    rank: int
    end: str
    message: str | None = None
    traceback: str | None = None
    expected: bool = False
    exit_status: int = 1
    at: float = math.inf

    @classmethod
    def read(cls, rank: int, code: int, errors: Path) -> Failure:
        """Describe a process that ended with `code` (minus the signal), and the error file that it may have
        left."""
        end = f"ended with exit status {code}"
        if code < 0:
            names = [each.name for each in signal.Signals if each == -code]
            end = f"was ended by {names[0] if names else f'signal {-code}'}"
        message = None
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(errors.read_text()).get("message")
        if not isinstance(message, dict):
            return cls(rank, end)
        facts = message["extraInfo"]
        return cls(
            rank,
            end,
            message["message"],
            facts["py_callstack"],
            facts.get("expected", False),  # these are not in a file that torch's own `record` wrote
            facts.get("exit_status", 1),
            float(facts.get("at", facts["timestamp"])),
        )


def report(
    failures: Iterable[Failure], ended_first: Collection[int], ranks: int, lacks_memory: bool = False
) -> RanksFailedError:
    """Return one error for all ranks: only the message where it is about the config, or where all ranks have
    the same message about bad input.

    The ranks in `ended_first`, which ended before others were told to, come first, then those that raised
    first. `lacks_memory`: whether the kernel has killed a process meanwhile."""
    first, *others = sorted(failures, key=lambda f: (f.rank not in ended_first, f.at, f.rank))
    name = f"rank {first.rank} of {ranks}"
    same = [f.rank for f in others if f.message is not None and f.message == first.message]
    if (
        first.expected
        and first.message is not None
        and (first.exit_status == ConfigError.exit_status or len(same) + 1 == ranks)
    ):
        return RanksFailedError(first.message, first.exit_status, first.rank, first.traceback)
    lacked = lacks_memory and first.message is None and first.end == KILLED
    why = f"it {first.end}" if first.message is None else first.message
    text = f"{name} failed first: {why}{', which the kernel sent for lack of memory' if lacked else ''}"
    if same:
        text += (
            f"\nrank{'s' if len(same) > 1 else ''} {', '.join(map(str, sorted(same)))} failed in the same way"
        )
    then = [each for each in others if each.message not in (None, first.message)]
    for failure in then[:SHOWN]:
        text += f"\nthen rank {failure.rank} failed: {str(failure.message).splitlines()[0]}"
    if len(then) > SHOWN:
        text += f"\nand {len(then) - SHOWN} more failed then"
    if first.traceback and not first.expected:
        text += f"\ntraceback: {keep(first.traceback, first.rank)}"
    error = RanksFailedError(text, first.exit_status, first.rank, first.traceback)
    error.out_of_memory = lacked
    return error
