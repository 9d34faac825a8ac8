"""Starts ranks on this host through torchrun's own agent, and says which one failed first. With those that
launchers on other hosts start they are one run.

Invariants: no rank outlives the launcher; when `launch` returns or raises, every rank of this host has
ended; where ranks meet is for `polyreme.launch.hosts` to say. The objects behind `torch.distributed.run` are
used rather than its command line, which takes a script's options that begin like its own for its own."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from polyreme.distributed.environment import LAUNCHED
from polyreme.distributed.failure import keep
from polyreme.errors import ConfigError, LaunchError
from polyreme.files.machine import killed_for_memory
from polyreme.launch.cores import PIN
from polyreme.launch.frames import Frame
from polyreme.launch.hosts import LOOPBACK, Hosts, Loopback, Meeting, started_by
from polyreme.launch.manner import PATIENCE, PLAIN, SAVING, Manner
from polyreme.launch.manner import RanksFailedError as RanksFailedError
from polyreme.launch.peers import LINGER, Peers
from polyreme.launch.processes import signal_group
from polyreme.launch.rank import WORD_OF_STOP
from polyreme.launch.requests import STOPPED
from polyreme.launch.signals import ENDINGS, WISHES, Wishes, acknowledge, listens
from polyreme.launch.streams import Printer, relayed

POLL = 0.1  # seconds between looks at the ranks
# a file in it: what is called so and has none is somebody else's
FOLDER, MARK = ("polyreme-launch-", "polyreme.launch")
KILLED = "was ended by SIGKILL"
SHOWN = 3  # ranks that failed later, of which a report says why


def manner_here(variables: Mapping[str, str] | None = None) -> Manner:
    """The manner of a launcher that people start, or else Slurm, Kubernetes or MPI, on this host alone or on
    several: what its ranks print is then printed as `several` does.

    Raises LaunchError for variables of such a launcher that are incomplete or contradict each other."""
    way = started_by()
    if way is None:
        return Manner(variables or {})
    printer = Printer()
    begun = partial(printer.begin, socket.gethostname(), way)
    return Manner(variables or {}, take=printer.take, begun=begun)


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    threads: int | None = None,
    saves: bool = False,
    manner: Manner = PLAIN,
    hosts: Hosts | None = None,
    failing: Callable[[bool], None] | None = None,
) -> signal.Signals | None:
    """Run `python COMMAND` as `ranks` ranks on this host and wait for their end.

    `command` is a script and its arguments, or "-m", a module and its arguments; arguments reach it as they
    are. Each rank computes with `threads` threads, by default its part of the cores; OMP_NUM_THREADS, if set,
    decides instead. Otherwise ranks stay on their part of the cores, unless the variable POLYREME_PIN is 0.
    The ranks' output passes through line by line.

    `saves`: the ranks take SIGTERM and SIGUSR1 as the wish to save and to end with status 0, or STOPPED where
    the command is to be run again. Each is forwarded, and they get SAVING seconds; a second SIGTERM kills
    them. Where all have ended well it is returned. `manner`: what else is asked for.
    `hosts`: other hosts run as many ranks each; it returns when theirs have ended, too. Those that save are
    asked to when a host comes that could take part. `failing` is called when a rank is first seen to fail,
    with whether one had ended by itself, before the others are ended; without it the launchers of several
    hosts watch each other, and all end where one fails, hangs or is lost.

    Raises LaunchError for a command that cannot be started, and RanksFailedError (naming the rank that failed
    first, with the exit status that fits) when a rank ends with a status other than 0 or a signal (ENDINGS,
    forwarded to the ranks) ends the run. From a thread other than the main one,
    signals are not forwarded."""
    _check(command, ranks, manner)
    variables = {**_for_ranks(ranks, threads, hosts), **manner.variables}
    meeting = Loopback(manner.ports) if hosts is None else Meeting(hosts, watched=failing is None)
    with contextlib.ExitStack() as held:
        folder, streams = held.enter_context(_folder()), None
        if manner.take:
            streams = held.enter_context(relayed(ranks, lambda frame: agent.take(frame), folder))
        for each in _variables(variables), _restored_signals(), _quiet_agent():
            held.enter_context(each)
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=meeting,
            entrypoint=sys.executable,
            args=(
                "-m",
                "polyreme.launch.rank",
                str(os.getpid()),
                *_rank_arguments(command, manner, saves, streams),
            ),
            max_restarts=0,
            monitor_interval=POLL,
            local_addr=LOOPBACK,
        )
        agent = _Agent(meeting, spec, DefaultLogsSpecs(log_dir=folder), shutdown_timeout=PATIENCE)
        agent.saves, agent.failing, agent.manner = saves, failing, manner
        kills = killed_for_memory()
        error: RanksFailedError | None = None
        try:
            _run(agent, Path(folder))
        except RanksFailedError as raised:
            error = raised
        finally:
            if meeting.peers is not None:
                error = _of_all_hosts(error, meeting.peers)
        if error is not None:
            if f"it {KILLED}" in str(error) and kills is not None and (killed_for_memory() or 0) > kills:
                error = _by_the_kernel(error)
            raise error
        return agent.wishes.first


def _run(agent: _Agent, folder: Path) -> None:
    """Until the ranks of this host have ended, and those of others. Raises RanksFailedError."""
    try:
        _end_by_signals(agent.saves)
        result = agent.run()
    except SignalException as caught:
        stopped = _stopped_by(caught.sigval)
        stopped.ended_well = all(process.poll() == 0 for process in agent.processes().values())
        raise stopped from None
    except KeyboardInterrupt:  # the agent had not taken over the signals
        raise _stopped_by(signal.SIGINT) from None
    wish = agent.wishes.first
    if result.is_failed():
        codes = [result.failures[rank].exitcode for rank in agent.ended_first]
        ends = {-code if code < 0 else code - 128 for code in codes}
        if wish is not None and (agent.late or ends == {wish}):
            raise _stopped_by(wish, agent.late)
        raise _report(result.failures, agent.ended_first, agent.world_size)
    if any(folder.rglob(f"*{WORD_OF_STOP}")):
        why = "by themselves" if wish is None else f"by {wish.name}"
        raise RanksFailedError(f"ranks have stopped {why}, and are to go on (status {STOPPED})", STOPPED)


def _by_the_kernel(error: RanksFailedError) -> RanksFailedError:
    """The same, of a rank that the kernel killed."""
    text = str(error).replace(f"it {KILLED}", f"it {KILLED}, which the kernel sent for lack of memory", 1)
    told = RanksFailedError(text, error.exit_status, error.rank, error.traceback)
    told.out_of_memory = True
    return told


def _of_all_hosts(error: RanksFailedError | None, peers: Peers) -> RanksFailedError | None:
    """What ended the ranks of all hosts, once they have ended: `error`, or what another host told before."""
    with contextlib.suppress(SignalException, KeyboardInterrupt):  # who waits for the others no longer
        if error is not None and error.exit_status != STOPPED:
            first, *lines = str(error).splitlines()
            more = [each.strip() for each in lines if each.startswith(("  at ", "traceback: "))] or lines[-1:]
            peers.fail("; ".join([first, *more]), error.exit_status)
            if error.rank is not None:
                told = f"on {socket.gethostname()}: {error}"
                error = RanksFailedError(told, error.exit_status, error.rank, error.traceback)
        if peers.failure() is not None:
            peers.leave(LINGER)
    ending = peers.elsewhere()
    peers.close()
    if ending is None:
        return error
    return RanksFailedError(f"every rank here was ended, too: {ending.text}", ending.status)


def _rank_arguments(command: Sequence[str], manner: Manner, saves: bool, streams: str | None) -> list[str]:
    """What `polyreme.launch.rank` gets, in which the agent turns "$$" into "$", and fills in the host's
    rank."""
    target, *own = (argument.replace("$", "$$") for argument in command)
    arguments = [target]
    if target == "-m":
        arguments.append(own.pop(0))
    elif manner.program:
        arguments.insert(0, "--program")
    if manner.log is not None:
        arguments[:0] = ["--log", manner.log.replace("$", "$$")]
    elif streams is not None:
        arguments[:0] = ["--streams", streams.replace("$", "$$") + "${local_rank}"]
    if saves:
        arguments.insert(0, "--saves")
    return [*arguments, *(["--local_rank=${local_rank}"] if manner.local_rank else []), *own]


def _check(command: Sequence[str], ranks: int, manner: Manner) -> None:
    if ranks < 1:
        raise LaunchError(f"ranks = {ranks}: at least one rank is needed; give -n 1 or more")
    target = command[1:2] if command[:1] == ["-m"] else command[:1]
    if not target:
        raise LaunchError("nothing to launch: give a script, or -m and a module")
    if manner.program:
        if shutil.which(command[0]) is None:
            raise LaunchError(f"{command[0]!r} is no program that can be run; give the path of an executable")
    elif command[0] != "-m" and not Path(command[0]).is_file():
        raise LaunchError(
            f"the script {command[0]!r} is not a file; give a Python script, or -m and a module"
        )


def _for_ranks(ranks: int, threads: int | None, hosts: Hosts | None) -> dict[str, str]:
    """Variables for ranks that share this host, which take the place of none that the user set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {"OMP_NUM_THREADS": str(threads or max(1, cores // ranks)), LAUNCHED: "1"}
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ and (threads or 0) <= cores // ranks:
        variables[PIN] = "1"
    if ranks > 1:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins takes the core of another rank
    if ranks > 1 and hosts is None:
        variables |= dict.fromkeys(
            ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo" if sys.platform.startswith("linux") else "lo0"
        )
    # Those that whoever started this process had it ignore (nohup, jobs in the background) stay ignored: the
    # agent would listen to all.
    if heard := [number.name for number in ENDINGS if signal.getsignal(number) != signal.SIG_IGN]:
        variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder for the ranks' last words, locked while this process lives. Those of this user's launchers
    that were killed are deleted."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        # the mark was made under the lock: who has the one and not the other has ended
        with contextlib.suppress(OSError):
            if (left / MARK).is_file() and left.lstat().st_uid == os.getuid():
                with _locked(left):
                    shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a file system without locks, on which nothing is deleted either
            held.enter_context(_locked(Path(folder)))
            Path(folder, MARK).touch()
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. OSError where another process holds it, or where it is a link or no folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the ranks, which inherit this process's."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _restored_signals() -> Iterator[None]:
    """Put back the signal handlers that the agent replaces."""
    numbers = {*ENDINGS, *WISHES}
    before = {number: action for number in numbers if (action := signal.getsignal(number)) is not None}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: then the agent replaced none
            for number, action in before.items():
                signal.signal(number, action)


def _end_by_signals(saves: bool) -> None:
    """Have the signals end the launcher while it waits for other hosts, in a container, too, where it is the
    first process, to which those without a handler are nothing. The agent puts its own in their place."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"got {number}", signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        for number in {*ENDINGS, *(WISHES if saves else ())}:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent would log what the report says. Its loggers set their own levels, so their way out is
    closed."""
    logger = logging.getLogger("torch.distributed.elastic")
    propagate, handlers = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = propagate, handlers


class _Agent(LocalElasticAgent):
    """torchrun's agent, which also notes who failed first, gives the others PATIENCE, not half a minute, to
    end, and passes wishes on."""

    ended_first: tuple[int, ...] = ()  # ranks that had ended badly when the first failure was seen
    failing: Callable[[bool], None] | None = None  # who is told of the first failure
    manner = PLAIN
    saves = False  # whether ranks save and end by themselves when they are asked to
    late = False  # whether they were killed because they did not
    _asked_at = math.inf  # seconds of the monotonic clock
    _first = 0  # the number of this host's first rank, once they have met

    def __init__(self, meeting: Loopback | Meeting, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._meeting = meeting
        self.wishes = Wishes()  # how they were asked

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._first = worker_group.workers[0].global_rank
        if self.manner.begun is not None:
            self.manner.begun(self._first, len(worker_group.workers))
        # ranks would show tracebacks of what they import at first
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if self.saves and threading.current_thread() is threading.main_thread():
            for number in self.manner.wishes:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, self._ask)
        return started

    def take(self, frame: Frame) -> None:
        """Hand on what a rank of this host printed, as that of its number among all."""
        assert self.manner.take is not None
        self.manner.take(frame._replace(rank=self._first + frame.rank))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Forward a wish; end at once where it comes again."""
        first = self.wishes.first is None
        if self.wishes.again(number):
            _kill(self.processes().values())
            raise SignalException("again", signal.Signals(number))
        if first:
            self._asked_at, processes = time.monotonic(), self.processes().values()
            if self.manner.interrupt_saves and any(listens(each.pid) for each in processes):
                acknowledge(number)  # else it ends them: no step has begun, or all is saved
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)  # to the rank alone: what it started would not save, but end

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return int(self._worker_group.workers[0].world_size)

    def _exit_barrier(self) -> None:
        """Wait for the ranks of other hosts, however long they go on."""
        if self._meeting.peers is None:
            super()._exit_barrier()
        else:
            self._meeting.peers.leave()

    def processes(self) -> dict[int, subprocess.Popen[bytes]]:
        """The processes by local rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        return {local: handler.proc for local, handler in self._pcontext.subprocess_handlers.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        processes = self.processes()
        if time.monotonic() > self._asked_at + SAVING and not self.late:
            self.late = True
            _kill(processes.values())
        if self.saves and self.wishes.first is None and self._meeting.somebody_waits():
            self._ask(signal.SIGUSR1, None)
        # A rank that raised waits (see polyreme.launch.rank): one that ended did so by itself, not for its
        # peer.
        raised = {local for local, file in self._pcontext.error_files.items() if Path(file).exists()}
        # perhaps because a dying peer closed its connections, which it does just before it has ended
        if raised:
            time.sleep(POLL)
        rank_of = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self.ended_first = tuple(
            rank_of[local] for local, process in processes.items() if process.poll() not in (None, 0)
        )
        peers = self._meeting.peers
        if raised or self.ended_first or (peers is not None and peers.failure() is not None):
            if self.failing is not None:
                self.failing(bool(self.ended_first))
            if peers is not None:
                if not self.ended_first:  # one that raised may have lost another host's, whose word comes
                    peers.failure(5 * POLL)
                peers.fail("a rank has failed")
            if self.saves:  # SIGTERM would have them go on to the end of their step, which will not come
                _kill(process for local, process in processes.items() if local not in raised)
            _end(list(processes.values()))
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, PATIENCE, SIGKILL, each to the rank and what it started."""
    for process in processes:
        signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    _kill(processes)


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        signal_group(process.pid, signal.SIGKILL)


def _stopped_by(number: signal.Signals, late: bool = False) -> RanksFailedError:
    how = (
        f"its ranks had not saved and ended {SAVING} s later, and were killed"
        if late
        else "every rank has ended"
    )
    return RanksFailedError(f"stopped by {number.name}; {how}", exit_status=128 + number)


@dataclass(frozen=True)
class _Failure:
    """How one rank failed. `at` is when it raised, in seconds, or infinity if it left no word of it."""

    rank: int
    end: str
    message: str | None = None
    traceback: str | None = None
    expected: bool = False
    exit_status: int = 1
    at: float = math.inf

    @classmethod
    def read(cls, rank: int, failure: ProcessFailure) -> _Failure:
        code = failure.exitcode
        end = f"was ended by {failure.signal_name()}" if code < 0 else f"ended with exit status {code}"
        message = failure.error_file_data.get("message")
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


def _report(
    failures: Mapping[int, ProcessFailure], ended_first: Sequence[int], ranks: int
) -> RanksFailedError:
    """One error for all ranks: the bare message where it is the config, or where all say the same of bad
    input.

    First are `ended_first`, who ended before any was told to, then who raised first."""
    all_failures = [_Failure.read(rank, failure) for rank, failure in failures.items()]
    first, *others = sorted(all_failures, key=lambda f: (f.rank not in ended_first, f.at, f.rank))
    name = f"rank {first.rank} of {ranks}"
    same = [f.rank for f in others if f.message is not None and f.message == first.message]
    if (
        first.expected
        and first.message is not None
        and (first.exit_status == ConfigError.exit_status or len(same) + 1 == ranks)
    ):
        return RanksFailedError(first.message, first.exit_status, first.rank, first.traceback)
    if first.message is None:
        text = f"{name} failed first: it {first.end}"
    else:
        text = f"{name} failed first: {first.message}"
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
    return RanksFailedError(text, first.exit_status, first.rank, first.traceback)
