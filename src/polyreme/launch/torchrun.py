"""Starts ranks on this host as torchrun does: with its variables, and a store where they meet. With those
that launchers on other hosts start they are one run.

Invariants: no rank outlives the launcher; when `launch` returns or raises, every rank of this host has
ended; where ranks meet is for `polyreme.launch.hosts` to say."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from polyreme.distributed.environment import LAUNCHED
from polyreme.errors import LaunchError
from polyreme.launch.cores import PIN
from polyreme.launch.hosts import Hosts, Meeting, alone, started_by
from polyreme.launch.local import Local
from polyreme.launch.manner import PLAIN, Manner
from polyreme.launch.manner import RanksFailedError as RanksFailedError
from polyreme.launch.streams import Printer

# a file in it: what is called so and has none is somebody else's
FOLDER, MARK = ("polyreme-launch-", "polyreme.launch")


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
    meet = Meeting(hosts, watched=failing is None).meet if hosts else partial(alone, manner.ports)
    commands = [_rank_arguments(command, manner, saves, rank) for rank in range(ranks)]
    wishes = manner.wishes if saves else ()
    with _folder() as folder:
        run = Local(commands, variables, Path(folder), meet, manner, wishes, failing)
        if hosts is not None:
            _kept[:] = [run]
        return run.run(wishes)


_kept: list[Local] = []
"""The last run beside other hosts, whose ranks may need the store of its meeting after those here."""


def _rank_arguments(command: Sequence[str], manner: Manner, saves: bool, local: int) -> list[str]:
    """What `polyreme.launch.rank` gets, for this host's rank number `local`."""
    target, *own = command
    arguments = [target]
    if target == "-m":
        arguments.append(own.pop(0))
    elif manner.program:
        arguments.insert(0, "--program")
    if saves:
        arguments.insert(0, "--saves")
    return [*arguments, *([f"--local_rank={local}"] if manner.local_rank else []), *own]


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
