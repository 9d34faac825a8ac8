"""Warm ranks for tests: real gloo process groups, started once from a forkserver and used again by every
test.

Invariant: a pool that gets a job is clean (every rank idle, in step, only the default group alive); a pool
that a job left otherwise is killed, and the next job of that world size gets new ranks. Nothing listens on a
fixed port: ranks meet in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from polyreme.distributed.world import current
from polyreme.launch.processes import die_with_parent
from polyreme.step.user.backward import listeners

WARM_RANKS = 8  # idle ranks kept over all world sizes; beyond it the pool used longest ago goes
_NOTHING = pickle.dumps(None)
GRACE = 2.0  # seconds that the other ranks get to answer once one has failed
PRELOAD = [  # imported once by the forkserver; ranks begin with them
    "bound",
    "torch.distributed",
    "torch._dynamo",  # torch.optim and torch.utils.checkpoint import it
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "pydantic",
    "pytest",
    "polyreme.cli.main",
    "polyreme.job.run",
    "polyreme.launch.torchrun",
    "polyreme.optim.compiled_kernels",
    "pool",
    "beforehand",
]


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Where processes begin that have imported PRELOAD."""
    # before it starts: it and all its children take their environment from here
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class RanksFailed(Exception):
    """A job failed on one or more ranks. `exceptions` has what each failed rank raised, where that can be
    pickled."""

    def __init__(self, report: str, exceptions: dict[int, BaseException]) -> None:
        super().__init__(report)
        self.exceptions = exceptions


@dataclass(frozen=True)
class Job:
    """A function to run on every rank as `function(rank, world_size, *args)`; pickled by reference."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    deprecations: Literal["error", "default"]


@dataclass(frozen=True)
class Answer:
    """What one rank sends back: a result, or a failure's traceback, moment and (if it pickles) exception."""

    result: bytes = _NOTHING  # pickled
    failure: str | None = None
    exception: BaseException | None = None
    at: float = -math.inf  # system-wide monotonic seconds; a rank that died has none and counts as first
    clean: bool = True


class Ranks:
    """Runs jobs on warm ranks; the session fixture `ranks` is one of these."""

    def __init__(self) -> None:
        self._context = forkserver()
        self._pools: dict[int, _Pool] = {}  # by world size, the one used last at the end

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 240,
        deprecations: Literal["error", "default"] = "error",
    ) -> list[Any]:
        """Results of `function(rank, world_size, *args)`, by rank.

        `function` stands at the top level of a test module, so that ranks can import it; arguments and
        results are pickled. On every rank the default process group is up (gloo), one thread computes, the
        seed is 0. With `deprecations="error"`, a deprecation warning that polyreme or torch.distributed
        causes fails the job. Raises RanksFailed with every rank's traceback, the first failure first, or
        every rank's stacks after `timeout` seconds."""
        job = pickle.dumps((sys.path, pickle.dumps(Job(function, args, deprecations))))
        pool = self._pools.pop(world_size, None)
        if pool is None or not pool.alive():
            self._make_room(world_size)
            pool = _Pool(self._context, world_size)
        try:
            answers = pool.run(job, timeout)
        except BaseException:
            pool.kill()
            raise
        if all(answer.clean for answer in answers):
            self._pools[world_size] = pool
        else:
            pool.kill()
        return [pickle.loads(answer.result) for answer in answers]

    def _make_room(self, world_size: int) -> None:
        while self._pools and sum(self._pools) + world_size > WARM_RANKS:
            self._pools.pop(next(iter(self._pools))).kill()

    def close(self) -> None:
        """End every rank."""
        for pool in self._pools.values():
            pool.kill()
        self._pools.clear()


class _Pool:
    """The processes of one world size."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.connections: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, self.folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        try:
            self._collect(timeout=120)  # every rank's first answer says that its process group is up
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(self, job: bytes, timeout: float) -> list[Answer]:
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a rank that died meanwhile is reported by _collect
                connection.send_bytes(job)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Answer]:
        """One answer per rank, or RanksFailed."""
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        answers: dict[int, Answer] = {}
        while waiting and (
            ready := multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        ):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = self._receive(rank, connection)
                if answers[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed = sorted(
            (rank for rank in answers if answers[rank].failure is not None), key=lambda r: answers[r].at
        )
        if not failed and not waiting:
            return [answers[rank] for rank in range(len(self.connections))]
        world_size = len(self.connections)
        report = [
            f"rank {rank} of {world_size} "
            f"failed{' first' if rank == failed[0] else ''}:\n{answers[rank].failure}"
            for rank in failed
        ]
        why = "after another rank failed" if failed else f"at the timeout of {timeout:g} s"
        stacks = self._stacks(sorted(waiting.values()))
        report += [
            f"rank {rank} of {world_size} still ran {why}; its stacks:\n{stacks[rank]}" for rank in stacks
        ]
        exceptions = {rank: error for rank in failed if (error := answers[rank].exception) is not None}
        raise RanksFailed("\n".join(["", *report]), exceptions)

    def _receive(self, rank: int, connection: Connection) -> Answer:
        try:
            answer = pickle.loads(connection.recv_bytes())
            assert isinstance(answer, Answer)
            return answer
        except (EOFError, OSError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            end = (
                f"signal {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"exit status {code}"
            )
            return Answer(failure=f"the process ended with {end}\n")

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Every thread's stack of ranks that still run; their faulthandler writes it even inside a blocked
        C++ call."""
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 3
        stacks, last = dict.fromkeys(ranks, ""), None
        while (stacks != last or not all(stacks.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
            last, stacks = stacks, {rank: self._stack_file(rank).read_text() for rank in ranks}
        return stacks

    def _stack_file(self, rank: int) -> Path:
        return _stack_file(self.folder, rank)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join(10)
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _serve(rank: int, world_size: int, folder: Path, connection: Connection) -> None:
    """A rank's whole life: join the process group, then run jobs until the connection closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the ranks
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        meeting = f"file://{folder / 'rendezvous'}"
        dist.init_process_group("gloo", meeting, timedelta(minutes=10), world_size, rank)
        gc.freeze()
        connection.send_bytes(pickle.dumps(Answer()))
        with contextlib.suppress(EOFError):
            while True:
                answer = _run(rank, world_size, connection.recv_bytes())
                connection.send_bytes(pickle.dumps(answer))
                # else killed soon; a barrier here could pair with one of the failed job
                if answer.failure is None:
                    _tidy()


def _run(rank: int, world_size: int, job_bytes: bytes) -> Answer:
    """One job, whatever comes of it."""
    torch.manual_seed(0)
    group = weakref.ref(dist.group.WORLD)  # a job may end it, and look for what is left of it
    try:
        sys.path[:], pickled = pickle.loads(job_bytes)
        job: Job = pickle.loads(pickled)
        with warnings.catch_warnings():
            if job.deprecations == "error":
                for category in (DeprecationWarning, FutureWarning):
                    warnings.filterwarnings(
                        "error", category=category, module=r"(polyreme|torch\.distributed)(\.|$)"
                    )
            result = pickle.dumps(job.function(rank, world_size, *job.args))
        return Answer(result, clean=dist.is_initialized() and dist.group.WORLD is group())
    except BaseException as error:
        at, text = time.monotonic(), traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return Answer(failure=text, at=at)
        return Answer(failure=text, exception=error, at=at)


def _tidy() -> None:
    """Put back what a job may have changed."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if dist.is_initialized():
        dist.barrier()  # a peer may still read the last message of a group that is about to close
        current().close()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    for listener in listeners():  # of engines that something of the job still holds
        listener.close()
    gc.collect()
    gc.freeze()  # what is left are imported modules; not to visit them again makes the next collection quick
