"""Start the ranks of several hosts from one of them, or from elsewhere, and show their output: by a process
on each (`polyreme.launch.on_host`), which this one reaches over ssh, or as its child on its own host.

Invariants: nothing starts before every host was checked, and all problems are reported at once. Where ranks
of one host fail, or a connection is lost, all hosts are ended; when `run` returns or raises, none of its
processes is left here, and those on other hosts have ended or end within LEAVING seconds of the loss of their
connection.
Communication: one pipe to and one from each host, within ssh. Ranks meet at one address of the first host."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polyreme.distributed.environment import LAUNCHED, PODS, RANKS_PER_POD, SERVICE
from polyreme.distributed.versions import versions
from polyreme.errors import LaunchError
from polyreme.launch import frames
from polyreme.launch.frames import MESSAGE, Frame
from polyreme.launch.hostfile import Active, find_login, is_this_machine
from polyreme.launch.on_host import ALIVE
from polyreme.launch.options import PLAIN, SAVING, LaunchOptions, RanksFailedError
from polyreme.launch.signals import acknowledge
from polyreme.launch.streams import Printer
from polyreme.launch.supervise import LEAVING, SupervisedRun, Transport

ANSWER = 90.0  # seconds for a host to be reached, and for a Python there to begin
PREFIXES = ("POLYREME_", "NCCL_", "GLOO_", "OMP_", "TORCH_")
"""Prefixes of the variables that all hosts get."""
_OWN = {LAUNCHED, PODS, SERVICE, RANKS_PER_POD}
SSH = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
LAST_WORDS = 5


class HostsError(LaunchError):
    """Hosts on which the ranks cannot be started, with the problems of all."""

    def __init__(self, problems: Mapping[str, Sequence[str]]) -> None:
        self.problems = problems
        lines = [f"  - {host}: {each}" for host, found in problems.items() for each in found]
        super().__init__("\n".join(["no rank was started:", *lines]))


@dataclass(frozen=True)
class RankCommand:
    """The command of the ranks on each host: as for `polyreme.launch.torchrun.launch`.

    `files` must exist on each host, in `folder`. `variables` are set for the ranks on all hosts, in addition
    to those whose names begin with PREFIXES, and `of_hosts` for those on one. Ranks meet at `address` of the
    first host (None: one that all others reach), at `port` (0: any that is free). `source` is a file that the
    shell of each host reads before anything is started there."""

    command: Sequence[str]
    threads: int | None = None
    saves: bool = False
    options: LaunchOptions = PLAIN
    files: Sequence[str] = ()
    folder: str = field(default_factory=os.getcwd)
    variables: Mapping[str, str] = field(default_factory=dict)
    of_hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    address: str | None = None
    port: int = 0
    source: str | None = None


class Process(Protocol):
    """What is used of the process on a host: some methods of subprocess.Popen."""

    stdin: Any
    stdout: Any
    stderr: Any

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...


def run(
    active: Active,
    what: RankCommand,
    *,
    ssh: Sequence[str] = ("ssh",),
    processes: Mapping[str, Process] | None = None,
) -> signal.Signals | None:
    """Run ranks on the slots of `active`, in its order, and wait for their end.

    `ssh` is the command that logs in, without terminal and questions; on this machine itself none is needed.
    `processes` are those that something else has started on the hosts already. Output of rank 0 is printed as
    it comes, that of others by lines after `[host rank] `. Ctrl-C, SIGTERM, SIGHUP and SIGQUIT end all hosts,
    a second one at once. In a run that saves, SIGTERM and SIGUSR1 are passed on as `launch` takes them, and
    the one by which it has ended well is returned.

    Raises HostsError where it cannot start, ResourceError where the program that logs in is missing, and
    RanksFailedError when ranks fail, or a signal ends them."""
    started = _Started(active, what, ssh, processes or {})
    return started.run(what.options.save_signals if what.saves else ())


def forwarded(names: Iterable[str] = (), variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that ranks on all hosts get: those that begin with PREFIXES, and NAME or
    NAME=VALUE of `names`. Raises LaunchError for a name that is not set."""
    found = {
        name: value for name, value in variables.items() if name.startswith(PREFIXES) and name not in _OWN
    }
    for each in names:
        name, equals, value = each.partition("=")
        if not equals and name not in variables:
            raise LaunchError(f"--env {each}: the variable is not set; set it, or write --env {each}=VALUE")
        found[name] = value if equals else variables[name]
    return found


def login(host: str, ssh: Sequence[str] = ("ssh",), source: str | None = None) -> list[str]:
    """Return the command that starts `on_host` on `host`, whose shell reads `source` before. Only paths in
    the shell's words come from the user."""
    module = ["-m", "polyreme.launch.on_host"]
    # the shell would look for a name without a slash on PATH
    first = f". {shlex.quote(source if '/' in source else f'./{source}')} && " if source else ""
    if is_this_machine(host):
        words = [sys.executable, *module]
        return ["sh", "-c", f"{first}exec {shlex.join(words)}"] if source else words
    there = ["env", f"PYTHONPATH={path}"] if (path := python_path()) else []
    # -P: nothing of the home folder is imported
    shell = first + shlex.join(["exec", *there, sys.executable, "-P", *module])
    return [*ssh, *SSH, "-T", "--", host, shell]


def python_path() -> str:
    """Return this process' PYTHONPATH with absolute paths."""
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return os.pathsep.join(str(Path(each).absolute()) for each in folders)


# ---- hosts


def _start(words: Sequence[str]) -> tuple[Process, str]:
    """Start the launcher's process (`on_host`) by the command of `login`. Returns it, and "ssh" or "this
    machine"."""
    # in its own session, so that Ctrl-C reaches it only through this process, in order
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    return process, "ssh" if "--" in words else "this machine"


class _Host:
    """One host: the process there, and how it ended."""

    def __init__(
        self, index: int, name: str, slots: Sequence[int], process: Process, way: str, events: _Events
    ) -> None:
        self.index, self.name, self.slots, self.events = index, name, slots, events
        self.facts: Mapping[str, Any] = {}
        self.failing: tuple[bool, float] | None = None  # (whether other than by itself, when it was reported)
        self.outcome: Mapping[str, Any] | None = None
        self.gone = False
        self.said: list[str] = []
        self.process, self.way = process, way
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._errors, self._frames)]
        for reader in self._readers:
            reader.start()

    def ask(self, **what: Any) -> None:
        """Send a request; nothing where the host is gone."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(frames.line(what))
            self.process.stdin.flush()

    def leave(self) -> None:
        """Close the pipe to the host, at which its process ends."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def why(self) -> str:
        """Describe why the process ended without reporting it itself."""
        said = "; ".join(self.said[-LAST_WORDS:])
        status = self.process.wait()
        if "nknown option" in said and "-P" in said:
            return (
                f"{sys.executable} is an older Python there, which does not know -P: Polyreme needs 3.11 or "
                f"newer on each host, the same as here ({platform.python_version()})"
            )
        if status == 127 or "No module named" in said:
            return (
                f"{said or 'no Python'}: the same Python, with Polyreme, is needed there as here, "
                f"{sys.executable}"
            )
        return f"{self.way} ended with status {status}" + (f": {said}" if said else "")

    def _frames(self) -> None:
        with contextlib.suppress(EOFError):
            frames.find_mark(self.process.stdout)
            while True:
                self.events.put((self, frames.unpack(self.process.stdout)))
        self.process.wait()
        self._readers[0].join(1.0)
        self.events.put((self, None))

    def _errors(self) -> None:
        for each in self.process.stderr:
            text = each.decode(errors="replace").rstrip()
            self.said = [*self.said[-LAST_WORDS:], text]
            if self.facts:  # earlier lines explain why it cannot be started
                print(f"[{self.name}] {text}", file=sys.stderr, flush=True)


_Events = queue.Queue[tuple[_Host, Frame | None]]


class _Started(Transport):
    """All hosts of a run."""

    grace = 1.0  # seconds in which others may fail by themselves
    saving = SAVING + LEAVING  # a host ends its ranks after SAVING itself

    def __init__(
        self, active: Active, what: RankCommand, ssh: Sequence[str], processes: Mapping[str, Process]
    ) -> None:
        self._active, self.what, self._ssh, self._processes = active, what, ssh, processes
        self.hosts: list[_Host] = []
        self.events = _Events(1000)
        self._said = time.monotonic()
        self._printer = Printer()
        self._begun = self._ending = False

    # ---- before the ranks

    def start(self, run: SupervisedRun) -> None:
        with run.interruptible():  # a name server may be slow
            find_login(others := self._active.keys() - self._processes.keys(), self._ssh)
            logins = {name: login(name, self._ssh, self.what.source) for name in others}
        for index, (name, slots) in enumerate(self._active.items()):
            if name in self._processes:
                process, way = self._processes[name], "Ray"
            else:
                process, way = _start(logins[name])
            self.hosts.append(_Host(index, name, slots, process, way, self.events))
        with run.interruptible():
            self._inspect()
            address = self._meeting_point()
        self._begin(address)

    def _inspect(self) -> None:
        """Ask every host whether it has what the run needs. Raises HostsError with all problems."""
        answers = self._answers(self.hosts, "look", folder=self.what.folder, files=list(self.what.files))
        mine = versions()
        problems, names = {}, dict[str, str]()
        for host, answer in answers.items():
            if isinstance(answer, str):
                problems[host.name] = [answer]
                continue
            host.facts = answer
            differing = [
                f"{name} {there} is there, and {mine[name]} here: install the same one"
                for name, there in answer["versions"].items()
                if there != mine[name]
            ]
            found = [*differing, *answer["problems"]]
            # Ray may have several nodes on one machine
            machine = None if host.way == "Ray" else answer["machine"]
            if machine in names:
                found.append(f"it is the machine of {names[machine]}, too: give all its slots in one line")
            elif machine is not None:
                names[machine] = host.name
            if found:
                problems[host.name] = found
        if problems:
            raise HostsError(problems)

    def _meeting_point(self) -> tuple[str, int] | None:
        """Return an address and a port of the first host that all others reach; None for a single host.

        Raises HostsError where there is none."""
        first, *others = self.hosts
        if not others:
            return None
        asked = self.what.address
        reached = [address for host in others for address in host.facts["reached"]]
        answer = self._answers(
            [first], "ways", addresses=[] if asked else first.facts["reached"], name=asked or first.name,
            port=self.what.port, others=[] if asked else [*reached, *(host.name for host in others)],
        )[first]  # fmt: skip
        listening = answer["listening"] if isinstance(answer, Mapping) else {}
        answers = self._answers(others, "reach", listening=listening) if listening else {}
        common = [
            address
            for address in listening
            if all(isinstance(each, Mapping) and address in each["reached"] for each in answers.values())
        ]
        if common:
            return common[0], listening[common[0]]
        lacking = [
            host.name for host, each in answers.items() if isinstance(each, str) or not each["reached"]
        ]
        tried = ", ".join(f"{address} port {port}" for address, port in listening.items())
        tried = tried or f"no address of it has port {self.what.port or 'any'} free"
        who = ", ".join(lacking or [host.name for host in others])
        if asked and not listening:
            tried = f"{asked} port {self.what.port}, which is no address of this host, or is taken"
        problem = (
            f"ranks would meet here, but {who} cannot connect to it ({tried}): is a firewall between them, "
            "or has another process the port?"
        )
        raise HostsError({first.name: [problem]})

    def _answers(self, hosts: Sequence[_Host], do: str, **what: Any) -> dict[_Host, Mapping[str, Any] | str]:
        """Return each host's answer, or a text why there is none."""
        for host in hosts:
            host.ask(do=do, **what)
        answers: dict[_Host, Mapping[str, Any] | str] = {}
        deadline = time.monotonic() + ANSWER
        while len(answers) < len(hosts) and time.monotonic() < deadline:
            for host, frame in self._next():
                if frame is None and host not in hosts:
                    raise HostsError({host.name: [host.why()]})
                answers[host] = host.why() if frame is None else json.loads(frame.data)
        for host in hosts:
            answers.setdefault(host, f"no answer within {ANSWER:g} s")
        return {host: answers[host] for host in hosts}

    def _next(self) -> Iterator[tuple[_Host, Frame | None]]:
        """Yield the next event, if one comes within a moment."""
        if time.monotonic() > self._said + ALIVE:
            self._said = time.monotonic()
            for host in self.hosts:
                host.ask(do="nothing")
        with contextlib.suppress(queue.Empty):
            yield self.events.get(timeout=0.1)

    # ---- the ranks

    def _begin(self, address: tuple[str, int] | None) -> None:
        """Start the ranks of every host, which meet at `address`, and print what is started."""
        first = 0
        options = dataclasses.asdict(self.what.options)
        for here in "take", "begun", "interrupt_saves":
            options.pop(here)
        common = {
            "command": list(self.what.command),
            "threads": self.what.threads,
            "saves": self.what.saves,
            "options": options,
            "count": len(self.hosts),
            "address": address,
        }
        self._begun = True
        for host in self.hosts:
            self._printer.begin(host.name, host.way, first, len(host.slots))
            variables = {**self.what.variables, **self.what.of_hosts.get(host.name, {})}
            host.ask(do="begin", index=host.index, slots=list(host.slots), variables=variables, **common)
            first += len(host.slots)
        if address is not None:
            print(f"{first} ranks meet at {address[0]} port {address[1]}", file=sys.stderr, flush=True)

    def look(self) -> bool:
        for host, frame in self._next():
            self._take(host, frame)
        return all(host.gone for host in self.hosts)

    def failing(self) -> bool:
        return any(host.failing for host in self.hosts)

    def _take(self, host: _Host, frame: Frame | None) -> None:
        if frame is None:
            host.gone = True
            if host.outcome is None:
                host.outcome = {
                    "message": f"the connection was lost ({host.why()})", "exit_status": 1, "rank": None
                }  # fmt: skip
                self._note(host, by_itself=True)
        elif frame.kind != MESSAGE:
            self._printer.take(frame)
        elif "failing" in (message := json.loads(frame.data)):
            self._note(host, by_itself=message["failing"])
        else:
            host.outcome = message
            if message["end"] != "well":
                self._note(host, by_itself=False)
        if all(each.outcome for each in self.hosts):  # until then ranks may need the first host's store
            for each in self.hosts:
                each.leave()

    def _note(self, host: _Host, by_itself: bool) -> None:
        """Record a failure that is not the result of an end that was asked for."""
        if host.failing is None and not self._ending:
            host.failing = (not by_itself, time.monotonic())

    def save(self, number: int) -> bool:
        if self.what.options.interrupt_saves:
            acknowledge(number)
        for host in self.hosts:  # where SIGINT would end the ranks
            host.ask(do="signal", number=int(signal.SIGTERM if number == signal.SIGINT else number))
        return True

    def end(self, number: int | None) -> None:
        """End all hosts. After a failure, a host that failed by itself is left to end; a signal ends each."""
        self._ending = True
        terminates = number == signal.SIGTERM and not self.what.saves
        for host in self.hosts:
            if host.failing is None or number is not None:
                host.ask(do="end", number=int(signal.SIGTERM if terminates else signal.SIGINT))

    def stopped(self) -> str:
        return "every host was told to end"

    def failure(self, save_signal: signal.Signals | None) -> RanksFailedError | None:
        failed = [host for host in self.hosts if host.failing]
        return self._report(sorted(failed, key=lambda host: host.failing or (True, 0.0))) if failed else None

    def _report(self, failed: Sequence[_Host]) -> RanksFailedError:
        first, *others = failed
        end = first.outcome or {"message": "it did not end", "exit_status": 1, "rank": None}
        text = f"on {first.name}: {end['message'] or 'it was ended'}"
        for host in others:
            message = (host.outcome or {}).get("message")
            if message and message != end["message"]:
                why = message.splitlines()[0].replace(" failed first: ", " failed: ", 1)
                text += f"\nthen on {host.name}: {why}"
        return RanksFailedError(text, end["exit_status"], end["rank"], end.get("traceback"))

    def close(self, within: float) -> None:
        for host in self.hosts:
            host.leave()
        deadline = time.monotonic() + (max(within, 1.0) if self._begun else 1.0)
        for host in self.hosts:
            while host.process.poll() is None:
                with contextlib.suppress(queue.Empty):
                    self.events.get(timeout=0.05)  # the process would block on a full queue
                if time.monotonic() > deadline:
                    host.process.kill()
                    host.process.wait()
        self._printer.flush()
