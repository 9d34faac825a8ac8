"""Ranks that are threads of this process, for products of many short runs: they start at once and wait for
nothing but each other.

Invariants: one rank runs at a time, until it waits for another or ends; then the next one that can go on
does. So the order of everything is that of the program, and where none can go on, all fail at once. What
torch and the engine keep for a process, a rank finds as it left it.
Communication: ranks read each other's tensors where they lie, as over shared memory."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from polyreme.distributed import mesh
from polyreme.distributed import world as worlds
from polyreme.distributed.mesh import Axis
from polyreme.distributed.sums import put, sum_into
from polyreme.distributed.work import DONE, Work, reporting
from polyreme.errors import TransportError
from polyreme.optim import sparse_rows
from polyreme.pipeline import weight_gradients
from polyreme.step import step
from pool import RanksFailed

OF_A_PROCESS: Sequence[tuple[Any, str]] = (
    (worlds, "_current"),
    (step, "_current"),
    (weight_gradients, "_current"),
    (weight_gradients, "_expected"),
    (sparse_rows, "_wanted"),
)
"""What the engine keeps for a process, beside what it keeps by engine, module or parameter."""
HERE = threading.local()
"""`world` and `rank` of a rank's thread."""


def run(size: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """Results of `function(rank, size, *args)`, by rank, as `pool.Ranks` has them of processes. Raises
    RanksFailed with every failed rank's traceback, the first failure first, or with all stacks after
    `timeout` seconds."""
    before, world = _kept(), World(size)
    threads = [
        threading.Thread(target=world.live, args=(rank, function, args), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    here: dict[str, Any] = {"join": _device, "world": _place, "groups": Groups, "_axis": _axis}
    here |= {"of_cpus": lambda group=None: "threads", "other_backend": lambda backend: None}
    with patch.multiple(mesh, **here):
        for thread in threads:
            thread.start()
        world.begin()
        late = world.late(threads, time.monotonic() + timeout)
    _keep(before)
    if late:
        raise RanksFailed(f"not done after {timeout:g} s:\n{late}", {})
    gc.collect()  # engines that were not closed, and what they have of the process
    if world.failures:
        raise RanksFailed(
            "\n".join(f"rank {rank}: {text}" for rank, (_, text) in world.failures.items()),
            {rank: error for rank, (error, _) in world.failures.items()},
        )
    return [world.results[rank] for rank in range(size)]


@dataclass
class Exchange:
    """One operation of all ranks of a group: what each gave, and who has read it."""

    what: str
    given: dict[int, Any] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


@dataclass
class Message:
    """A send without its receive, or a receive without its send."""

    tensor: Tensor
    sent: bool
    met: bool = False


class World:
    """The ranks, whose turn it is, and what they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.results: dict[int, Any] = {}
        self.failures: dict[int, tuple[BaseException, str]] = {}
        self.exchanges: dict[tuple[Any, ...], Exchange] = {}
        self.messages: dict[tuple[Any, ...], deque[Message]] = defaultdict(deque)
        self.opened: dict[tuple[Any, ...], int] = defaultdict(int)  # backends, by group and rank
        self.broken: dict[tuple[Any, ...], str] = {}  # why nothing is done by backends any more
        self._why = ""  # nothing more can come
        self._over = False  # nobody waits for results any more
        self._turns = [threading.Event() for _ in range(size)]
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        torch.manual_seed(0)
        *torch_has, kept = _kept()
        self._states = [(*torch_has, [worlds.World(), *kept[1:]]) for _ in range(size)]

    def begin(self) -> None:
        """Let the ranks run."""
        self._waits = dict.fromkeys(range(self.size), (lambda: True, "its beginning"))
        self._turns[0].set()

    def live(self, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """All that a rank's thread does."""
        HERE.world, HERE.rank = self, rank
        try:
            self._take_turn(rank)
            self.results[rank] = function(rank, self.size, *args)
        except BaseException as error:
            self.failures[rank] = (error, traceback.format_exc())
            self._why = self._why or f"rank {rank} raised {type(error).__name__}: {error}"
        self._pass_on(rank)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Let others run until `until()`. Raises TransportError where that cannot come."""
        if until():
            return
        if getattr(HERE, "world", None) is not self:
            raise TransportError("a thread that is no rank waits, which ranks that are threads cannot do")
        rank = HERE.rank
        self._waits[rank] = until, what
        self._states[rank] = _kept()
        self._pass_on(rank)
        self._take_turn(rank)
        if not until():
            raise TransportError(self._why)

    def late(self, threads: Sequence[threading.Thread], deadline: float) -> str:
        """Wait for the threads; the stacks of those that did not end by then."""
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        frames = sys._current_frames()
        stacks = {thread.name: frames.get(thread.ident or 0) for thread in threads if thread.is_alive()}
        self._over = True
        return "\n".join(
            f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks.items()
        )

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank after this one that can go on, which may be this one itself."""
        ranks = [(rank + step) % self.size for step in range(1, self.size + 1)]
        waiting = [each for each in ranks if each in self._waits]
        able = [each for each in waiting if self._why or self._waits[each][0]()]
        if waiting and not able:
            self._why = "no rank can go on: " + ", ".join(
                f"rank {each} waits in {self._waits[each][1]}" for each in sorted(waiting)
            )
        for each in (able or waiting)[:1]:
            self._turns[each].set()

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].wait()
        self._turns[rank].clear()
        self._waits.pop(rank, None)
        if self._over:  # the process' state is that of others now
            raise SystemExit
        _keep(self._states[rank])


class Threads:
    """A `Backend` of the ranks `group` of a world of threads, of which this one is the `rank`th."""

    kind, deterministic, device = "threads", True, torch.device("cpu")

    def __init__(self, axis: str, size: int, rank: int, group: tuple[Any, ...]) -> None:
        self._axis, self._size, self._rank, self._world = axis, size, rank, HERE.world
        # engines of one process meet over the same groups, one after the other
        self._world.opened[group, rank] += 1
        self._key = group, self._world.opened[group, rank]
        self._begun = 0

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        def fill(parts: Sequence[Tensor]) -> None:
            for place, part in zip(full.chunk(self._size), parts, strict=True):
                put(place, part)

        return self._begin(f"all-gather{of}", shard, fill)

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        def add(parts: Sequence[Tensor]) -> None:
            sum_into(out, [part.chunk(self._size)[self._rank] for part in parts], accumulate)

        return self._begin(f"reduce-scatter{of}", full, add)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        def fill(parts: Sequence[Sequence[Tensor]]) -> None:
            for place, part in zip(received, parts, strict=True):
                put(place, part[self._rank])

        return self._begin(f"all-to-all{of}", sent, fill)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._begin("all-reduce", tensor.clone(), lambda parts: sum_into(tensor, parts, False))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._begin("broadcast", tensor.clone(), lambda parts: put(tensor, parts[source]))

    def send(self, tensor: Tensor, to: int) -> Work:
        return self._meet(tensor, True, (self._rank, to))

    def receive(self, tensor: Tensor, source: int) -> Work:
        return self._meet(tensor, False, (source, self._rank))

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        found: list[bytes] = []
        self._begin("gathering reports", data, found.extend).wait()
        return found

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(size, dtype=dtype, device=device)

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes

    def abort(self, why: str) -> None:
        self._world.broken[self._key] = f"rank {self._rank} {why}"

    def close(self) -> None:
        """Nothing: the world has all."""

    def _begin(self, what: str, mine: Any, finish: Callable[[Sequence[Any]], None]) -> Work:
        """`finish` is called with what all ranks gave, in rank order."""
        key, everyone = (*self._key, self._begun), range(self._size)
        what = f"{what} over {self._axis}"
        self._begun += 1
        with reporting(what):
            self._wait(lambda: True, what)
        exchange = self._world.exchanges.setdefault(key, Exchange(what))
        if exchange.what != what:
            raise TransportError(f"{what} failed, because another rank began {exchange.what} in its place")
        exchange.given[self._rank] = mine

        def complete() -> None:
            self._wait(lambda: len(exchange.given) == self._size, what)
            finish([exchange.given[rank] for rank in everyone])
            exchange.read.add(self._rank)
            if len(exchange.read) == self._size:
                del self._world.exchanges[key]

        def settled(block: bool) -> bool:
            if block:
                self._wait(lambda: len(exchange.read) == self._size, what)
            return len(exchange.read) == self._size

        return Work((), complete, what, settled)

    def _meet(self, tensor: Tensor, sent: bool, way: tuple[int, int]) -> Work:
        """Copy the tensor where its other half is there already, and else leave that to it."""
        posted, what = (
            self._world.messages[self._key, way],
            f"{'send' if sent else 'receive'} over {self._axis}",
        )
        if posted and posted[0].sent != sent:
            other = posted.popleft()
            with torch.no_grad():
                (other.tensor if sent else tensor).copy_(tensor if sent else other.tensor)
            other.met = True
            return DONE
        posted.append(mine := Message(tensor, sent))
        return Work((), lambda: self._wait(lambda: mine.met, what), what)

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        broken = self._world.broken
        self._world.wait(lambda: self._key in broken or until(), what)
        if self._key in broken:
            raise TransportError(broken[self._key])


class Groups:
    """In place of the process group's: a group is the ranks in it."""

    def of(self, ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> tuple[Any, ...]:
        return ranks, backend


def _device(*_: Any) -> torch.device:
    return torch.device("cpu")


def _place() -> tuple[int, int]:
    return HERE.world.size, HERE.rank


def _axis(name: str, size: int, rank: int, group: tuple[Any, ...], *_: Any) -> Axis:
    return Axis(name, size, rank, Threads(name, size, rank, group))


def _kept() -> tuple[Any, ...]:
    state = torch.get_rng_state(), torch.get_default_dtype()
    return *state, [getattr(owner, name) for owner, name in OF_A_PROCESS]


def _keep(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    torch.set_default_dtype(state[1])
    for (owner, name), value in zip(OF_A_PROCESS, state[2], strict=True):
        setattr(owner, name, value)
