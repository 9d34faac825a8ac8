"""Start ranks on this host as torchrun does: with its variables, and a store where they meet. Launchers on
other hosts may start further ranks of the same run.

Invariants: no rank outlives the launcher; when `launch` returns or raises, every rank of this host has ended;
`polyreme.launch.hosts` decides where ranks meet."""

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
from polyreme.launch.hosts import Hosts, Rendezvous, alone, started_by
from polyreme.launch.local import Local
from polyreme.launch.options import PLAIN, LaunchOptions
from polyreme.launch.options import RanksFailedError as RanksFailedError
from polyreme.launch.streams import Printer

# the prefix of a launcher's temporary folder, and a file in it: a folder without it is somebody else's
FOLDER, MARK = ("polyreme-launch-", "polyreme.launch")


def options_here(variables: Mapping[str, str] | None = None) -> LaunchOptions:
    """Return the options of a launcher that a person started, or Slurm, Kubernetes or MPI on one host or
    several. In the latter case the output of ranks is printed as `several` does.

    Raises LaunchError for variables of such a launcher that are incomplete or contradict each other."""
    way = started_by()
    if way is None:
        return LaunchOptions(variables or {})
    printer = Printer()
    begun = partial(printer.begin, socket.gethostname(), way)
    return LaunchOptions(variables or {}, take=printer.take, begun=begun)


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    threads: int | None = None,
    saves: bool = False,
    options: LaunchOptions = PLAIN,
    hosts: Hosts | None = None,
    failing: Callable[[bool], None] | None = None,
) -> signal.Signals | None:
    """Run `python COMMAND` as `ranks` ranks on this host and wait for their end.

    `command` is a script and its arguments, or "-m", a module and its arguments, which are passed on
    unchanged. Each rank computes with `threads` threads, by default its share of the cores; OMP_NUM_THREADS,
    if set, decides instead. Ranks with default threads are pinned to their share of the cores, unless the
    variable POLYREME_PIN is 0. The ranks' output passes through line by line.

    `saves`: the ranks take SIGTERM and SIGUSR1 as the request to save and to end with status 0, or STOPPED
    where the command is to be run again. Each is forwarded, and they get SAVING seconds; a second SIGTERM
    kills them. Where all have ended well the signal is returned. `options`: see `LaunchOptions`. `hosts`:
    other hosts run as many ranks each; it returns when theirs have ended, too. Ranks that save are asked to
    when another host comes that could take part. `failing` is called when a rank is first seen to fail, with
    whether one had ended by itself, before the others are ended; without it the launchers of several hosts
    watch each other, and all end where one fails, hangs or is lost.

    Raises LaunchError for a command that cannot be started, and RanksFailedError (naming the rank that failed
    first, with the exit status that fits) when a rank ends with a status other than 0 or a signal (ENDINGS,
    forwarded to the ranks) ends the run. From a thread other than the main one, signals are not forwarded."""
    _check(command, ranks, options)
    variables = {**_for_ranks(ranks, threads, hosts), **options.variables}
    meet = Rendezvous(hosts, watched=failing is None).meet if hosts else partial(alone, options.ports)
    commands = [_rank_arguments(command, options, saves, rank) for rank in range(ranks)]
    save_signals = options.save_signals if saves else ()
    with _folder() as folder:
        run = Local(commands, variables, Path(folder), meet, options, save_signals, failing)
        if hosts is not None:
            _kept[:] = [run]
        return run.run(save_signals)


_kept: list[Local] = []
"""The last run beside other hosts, kept alive for its store, which ranks of other hosts may need after those
here."""


def _rank_arguments(command: Sequence[str], options: LaunchOptions, saves: bool, local: int) -> list[str]:
    """Return the arguments of `polyreme.launch.rank` for this host's rank number `local`."""
    target, *own = command
    arguments = [target]
    if target == "-m":
        arguments.append(own.pop(0))
    elif options.program:
        arguments.insert(0, "--program")
    if saves:
        arguments.insert(0, "--saves")
    return [*arguments, *([f"--local_rank={local}"] if options.local_rank else []), *own]


def _check(command: Sequence[str], ranks: int, options: LaunchOptions) -> None:
    if ranks < 1:
        raise LaunchError(f"ranks = {ranks}: at least one rank is needed; give -n 1 or more")
    target = command[1:2] if command[:1] == ["-m"] else command[:1]
    if not target:
        raise LaunchError("nothing to launch: give a script, or -m and a module")
    if options.program:
        if shutil.which(command[0]) is None:
            raise LaunchError(f"{command[0]!r} is no program that can be run; give the path of an executable")
    elif command[0] != "-m" and not Path(command[0]).is_file():
        raise LaunchError(
            f"the script {command[0]!r} is not a file; give a Python script, or -m and a module"
        )


def _for_ranks(ranks: int, threads: int | None, hosts: Hosts | None) -> dict[str, str]:
    """Return variables for ranks that share this host, without those that the user has set."""
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
    """Make a folder for the ranks' error files, locked while this process lives. Folders that killed
    launchers of this user left are deleted."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        # the mark is made under the lock, so a folder with the mark and no lock is of a dead launcher
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
    """Hold a folder's lock. Raises OSError where another process holds it, or where it is a link or no
    folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
