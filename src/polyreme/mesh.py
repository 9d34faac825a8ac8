"""Named axes over the ranks, and every collective that Polyreme uses. The one importer of `torch.distributed` in the engine.

Invariants: every rank of an axis issues the same operations on it in the same order; a sum over ranks is taken in rank order for
each element by itself, so that it does not depend on where in a buffer the element lies; an axis of size 1 moves nothing.

Communication: on CPU ranks (gloo) all-gather and reduce-scatter are direct exchanges between each pair of ranks, which send
(n-1)/n of the buffer, half of what gloo's own reduce-scatter sends, and sum in the output's dtype whatever the dtype on the
wire. Ranks of one host only tell each other where a buffer lies (`transport.shared_memory`), if it came from `Axis.empty`, and read it
there. On other backends they are the backend's own. Nothing goes through gloo's worker threads: one that still holds a tensor when the
interpreter ends aborts the process.
"""

from __future__ import annotations

import atexit
import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.axes import AXES, lines
from polyreme.errors import TransportError
from polyreme.transport.shared_memory import Board, heap, peer

CHUNK = 1 << 18
"""Elements summed at a time: small enough that a chunk and its conversion stay in the cache."""
SMALL = 4096
"""Bytes below which numbers are sent even to a rank of the same host: telling it where they lie takes as many messages."""
STAGED = 4
"""Copies of one size, of tensors that others cannot read where they are, which are kept to be used again."""
TAGS = 1 << 28
"""Numbers that tell messages of one exchange from those of another, whatever the order in which the exchanges are waited for."""


@dataclass
class Count:
    """Calls of one operation on one axis, and the bytes that this rank sent in them."""

    calls: int = 0
    bytes: int = 0


class Work:
    """An operation under way. `wait` returns when its output is complete, and `settle` when its input may be overwritten, too: ranks of
    this host may still read it where it lies. A second call does nothing."""

    def __init__(
        self,
        pending: Sequence[dist.Work | None] = (),
        finish: Callable[[], None] | None = None,
        what: str = "",
        settled: Callable[[bool], bool] = lambda block: True,
    ) -> None:
        """`finish` is called when `pending` is complete. `settled` tells whether the input is free; given True, it waits till then."""
        self._pending, self._finish, self._what, self._settled = deque(pending), finish, what, settled

    def wait(self) -> None:
        with _reporting(self._what):
            while self._pending:
                if (work := self._pending.popleft()) is not None:
                    work.wait()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()

    def settle(self) -> None:
        self.wait()
        with _reporting(self._what):
            self._settled(True)

    def is_settled(self) -> bool:
        """Whether `settle` would return at once; that of an operation nobody has waited for would not."""
        return not self._pending and self._finish is None and self._settled(False)


DONE = Work()


class Axis:
    """One named axis of the mesh as this rank sees it: the ranks that differ only in this coordinate.

    All tensors are flat and contiguous. Bytes are counted as sent by this rank: (n-1) shards for an all-gather and for a
    reduce-scatter, and for an all-reduce (n-1) times the tensor in a direct exchange, 2(n-1)/n of it by a backend.

    Every operation raises TransportError where a rank has ended or cannot be reached.
    """

    def __init__(
        self,
        name: str,
        size: int = 1,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=10),
        shared_memory: bool = False,
    ) -> None:
        self.name, self.size, self.rank = name, size, rank
        self.counts: dict[str, Count] = defaultdict(Count)
        self._group = group
        self._direct = group is not None and dist.get_backend(group) == "gloo"
        self._board: Board | None = None  # shared with the ranks of this host, if there are others
        self._staged: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Work]]] = defaultdict(deque)
        self._exchanges = self._notices = 0
        if shared_memory and self._direct:
            self._meet(timeout)

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, size={self.size}, rank={self.rank})"

    def all_gather(self, full: Tensor, shard: Tensor) -> Work:
        """Fill `full` (n * s elements) with every rank's `shard` (s elements) in rank order.

        `shard` may be this rank's part of `full`; then it is not copied."""
        places = full.chunk(self.size)

        def fill(parts: Sequence[Tensor]) -> None:
            for place, part in zip(places, parts, strict=True):
                if place.data_ptr() != part.data_ptr():
                    place.copy_(part)

        if self.size == 1 or shard.numel() == 0:
            fill([shard] * self.size)
            return DONE
        self._count("all_gather", (self.size - 1) * _bytes(shard))
        if self._direct:
            return self._exchange([shard] * self.size, places.__getitem__, fill, "all-gather")
        if places[self.rank].data_ptr() != shard.data_ptr():
            places[self.rank].copy_(shard)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        return Work([gather(full, shard, group=self._group, async_op=True)], what=f"all-gather over {self.name}")

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False) -> Work:
        """Sum `full` (n * s elements) over the ranks; this rank's part of the sum goes to `out` (s elements), in `out`'s dtype.

        With `accumulate` the sum is added to what `out` holds. `full` must stay untouched until the work is done; `out` may be
        this rank's part of it."""
        parts = full.chunk(self.size)
        if self.size == 1 or out.numel() == 0:
            _sum_into(out, parts, accumulate)
            return DONE
        self._count("reduce_scatter", (self.size - 1) * _bytes(parts[0]))
        if self._direct:
            return self._exchange(parts, lambda _: torch.empty_like(out, dtype=full.dtype),
                                  lambda received: _sum_into(out, received, accumulate), "reduce-scatter")  # fmt: skip
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        what = f"reduce-scatter over {self.name}"
        if out.dtype == full.dtype and not accumulate:
            return Work([scatter(out, full, group=self._group, async_op=True)], what=what)
        wide = full if full.dtype == out.dtype else full.to(out.dtype)
        part = torch.empty_like(out)
        pending = [scatter(part, wide, group=self._group, async_op=True)]
        return Work(pending, lambda: _sum_into(out, [part], accumulate), what)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` (contiguous, of any shape) over the ranks in place; the result is the same to the last bit on every rank."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        if not self._direct:
            self._count("all_reduce", 2 * (self.size - 1) * _bytes(tensor) // self.size)
            return Work([dist.all_reduce(tensor, group=self._group, async_op=True)], what=f"all-reduce over {self.name}")
        self._count("all_reduce", (self.size - 1) * _bytes(tensor))
        flat = tensor.view(-1)
        if self._board is None or flat.nbytes < SMALL:
            out = [flat] * self.size
        else:  # others read a copy while the sum takes its place
            copy = self._stage(flat)
            out = [flat if rank == self.rank else copy for rank in range(self.size)]
        work = self._exchange(out, lambda _: torch.empty_like(flat), lambda parts: _sum_into(flat, parts, False), "all-reduce")
        if out[self.rank - 1] is not flat:
            self._unstage(copy, work)
        return work

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` (contiguous, of any shape and dtype) of rank `source` of this axis to all its ranks."""
        if self.size == 1 or tensor.numel() == 0:
            return
        self._count("broadcast", _bytes(tensor) * (self.rank == source))
        flat, what = tensor.view(-1).view(torch.uint8), f"broadcast over {self.name}"
        with _reporting(what):
            if not self._direct:
                dist.broadcast(flat, group=self._group, group_src=source)
                return
            if self.rank == source:
                pending = [dist.isend(flat, group=self._group, group_dst=to) for to in range(self.size) if to != source]
            else:
                pending = [dist.irecv(flat, group=self._group, group_src=source)]
        Work(pending, what=what).wait()

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send a contiguous `tensor` to rank `to` of this axis. Sends between two ranks arrive in the order of their receives."""
        self._count("send", _bytes(tensor))
        with _reporting(what := f"send over {self.name}"):
            return Work([dist.isend(tensor, group=self._group, group_dst=to, tag=TAGS)], what=what)

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to fill a contiguous `tensor` with what rank `source` sends."""
        with _reporting(what := f"receive over {self.name}"):
            return Work([dist.irecv(tensor, group=self._group, group_src=source, tag=TAGS)], what=what)

    def send_object(self, value: object, to: int) -> None:
        """Send `value` (what JSON can hold) to rank `to`, and wait until it has it."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()]), text):
            self.send(tensor if self._direct else tensor.cuda(), to).settle()

    def receive_object(self, source: int) -> Any:
        """What rank `source` sends."""
        device = None if self._direct else torch.device("cuda")
        size = torch.empty(1, dtype=torch.int64, device=device)
        self.receive(size, source).wait()
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
        self.receive(text, source).wait()
        return json.loads(bytes(text.tolist()))

    def gather_objects(self, value: object) -> list[object]:
        """Every rank's `value` (what JSON can hold), in rank order. For set-up and error reports, not for training."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._all(torch.tensor([text.numel()]), "gathering reports")]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = zip(self._all(padded, "gathering reports"), sizes, strict=True)
        return [json.loads(bytes(received[:size].tolist())) for received, size in texts]

    def _all(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Every rank's `tensor`, one on the CPU and of the same shape everywhere."""
        if self._direct:
            received: list[Tensor] = []
            out = [tensor] * self.size
            self._exchange(out, lambda _: torch.empty_like(tensor), lambda parts: received.extend(p.clone() for p in parts), what).settle()
            return received
        there = tensor.cuda()
        received = [torch.empty_like(there) for _ in range(self.size)]
        with _reporting(f"{what} over {self.name}"):
            dist.all_gather(received, there, group=self._group)
        return [each.cpu() for each in received]

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1)).settle()

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor, not initialised, that ranks of this host can read: it is exchanged without a copy."""
        if self._board is not None and device.type == "cpu":
            return self._board.heap.empty(size, dtype)
        return torch.empty(size, dtype=dtype, device=device)

    def _meet(self, timeout: timedelta) -> None:
        """Find the ranks of this axis that are on this host."""
        mine = heap()
        board = None if mine is None else Board(mine, self.rank, self.size, timeout.total_seconds())
        addresses: list[Any] = self.gather_objects(None if mine is None or board is None else (mine.address, board.offset))
        peers = {rank: peer(*address[0]) for rank, address in enumerate(addresses) if address and rank != self.rank}
        can_read: list[Any] = self.gather_objects([rank for rank, found in peers.items() if found])
        for rank, found in peers.items():
            if found and self.rank in can_read[rank] and board is not None:
                board.meet(rank, found, addresses[rank][1])
                self._board = board

    def _exchange(
        self,
        out: Sequence[Tensor],
        into: Callable[[int], Tensor],
        finish: Callable[[Sequence[Tensor]], None],
        what: str,
    ) -> Work:
        """Begin to give out[r] to every rank r of the axis and to get theirs, all of one size; `finish` is called with what came, in rank
        order (out[own rank] among it).

        A peer on this host gets told where out[r] lies, and says when it has read it. Others, and all where it is little, get the numbers,
        received in into(r).
        """
        what = f"{what} over {self.name}"
        board = None if out[0].nbytes < SMALL else self._board
        near = board.ranks if board is not None else ()
        tag, notice = self._exchanges % TAGS, self._notices
        self._exchanges += 1
        self._notices += board is not None
        parts, ready = list(out), {id(out[rank]): out[rank] for rank in near}
        for key, each in ready.items():
            if board is not None and board.heap.offset(each) < 0:
                ready[key] = self._stage(each)
        pending = []
        with _reporting(what):
            for step in range(1, self.size):  # each rank starts with another peer, so that none is everybody's first
                to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                if source not in near:
                    parts[source] = into(source)
                    pending.append(dist.irecv(parts[source], group=self._group, group_src=source, tag=tag))
                if board is not None and to in near:
                    board.post(to, notice, ready[id(out[to])])
                else:
                    pending.append(dist.isend(out[to], group=self._group, group_dst=to, tag=tag))
        if board is None:
            return Work(pending, lambda: finish(parts), what)

        def complete() -> None:
            for source in near:
                parts[source] = board.await_post(source, notice, out[source].numel(), out[source].dtype)
            finish(parts)
            for source in near:
                board.acknowledge(source, notice)

        def settled(block: bool) -> bool:
            for to in near if block else ():
                board.await_read(to, notice)
            return all(board.was_read(to, notice) for to in near)

        work = Work(pending, complete, what, settled)
        UNSETTLED.hold(work, list(ready.values()))
        for key, each in ready.items():
            if key != id(each):
                self._unstage(each, work)
        return work

    def _stage(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` that ranks of this host can read."""
        assert self._board is not None
        copies = self._staged[tensor.numel(), tensor.dtype]
        reusable = bool(copies) and copies[0][1].is_settled()
        copy = copies.popleft()[0] if reusable else self._board.heap.empty(tensor.numel(), tensor.dtype)
        return copy.copy_(tensor)

    def _unstage(self, copy: Tensor, last: Work) -> None:
        """Keep `copy` for another tensor of its size, to which it can be given once `last` is settled."""
        copies = self._staged[copy.numel(), copy.dtype]
        if len(copies) < STAGED:
            copies.append((copy, last))

    def _count(self, operation: str, sent: int) -> None:
        count = self.counts[operation]
        count.calls += 1
        count.bytes += sent


@dataclass
class Mesh:
    """All axes of a run. `mesh.dp`, `mesh.tp`, ... are Axis; axes that a run does not use have size 1."""

    rank: int
    world_size: int
    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)
    _lines: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    _timeout: timedelta = timedelta(minutes=10)

    def __getattr__(self, name: str) -> Axis:
        try:
            return self.__dict__["axes"][name]
        except KeyError:
            raise AttributeError(f"no axis {name!r}; the axes are {', '.join(AXES)}") from None

    @classmethod
    def open(
        cls,
        sizes: Mapping[str, int],
        order: Sequence[str] = AXES,
        timeout: timedelta = timedelta(minutes=10),
        shared_memory: bool = True,
    ) -> Mesh:
        """Build the axes over all ranks; `sizes` gives each axis' size and their product is the world size.

        Joins the process group that exists, or else the one that the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...) describes;
        without either, one process is the whole world. With `shared_memory`, CPU ranks of one host read each other's memory.
        Raises TransportError where the ranks cannot meet.
        """
        device = _device()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo", timeout=timeout)
                atexit.register(close)
            except (RuntimeError, ValueError) as error:
                raise TransportError(f"the ranks could not meet: {error}") from error
        world_size, rank = world()
        if math.prod(sizes.values()) != world_size:
            raise TransportError(f"the axes {dict(sizes)} make {math.prod(sizes.values())} ranks, but there are {world_size}")
        axes = {name: Axis(name) for name in AXES}
        all_lines = {name: lines(sizes, order, name) for name in order}
        for name in order:
            for ranks in all_lines[name]:
                if len(ranks) > 1:
                    group = GROUPS.of(tuple(ranks), timeout)  # every rank takes part in making every group
                    if rank in ranks:
                        axes[name] = Axis(name, len(ranks), ranks.index(rank), group, timeout, shared_memory)
        return cls(rank, world_size, device, axes, all_lines, timeout)

    def part(self, name: str, ranks: Sequence[int]) -> Axis:
        """An axis of its own over some `ranks` of axis `name`; of size 1 on the others. All ranks of the mesh must call."""
        mine = self.axes[name]
        if len(ranks) == 1 or mine.size == 1:
            return Axis(name)
        found = Axis(name)
        for line in self._lines[name]:
            group = GROUPS.of(tuple(line[rank] for rank in ranks), self._timeout)
            if self.rank in line and mine.rank in ranks:
                found = Axis(name, len(ranks), list(ranks).index(mine.rank), group, self._timeout)
                found.counts = mine.counts
        return found

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Since the start, by axis and operation: (calls, bytes sent by this rank)."""
        return {
            name: {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}
            for name, axis in self.axes.items()
            if axis.counts
        }


def world() -> tuple[int, int]:
    """(world size, rank) of the process group, or (1, 0) without one; before it is opened, as the environment says."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def close() -> None:
    """Leave the process group, if there is one."""
    GROUPS.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Turns a backend's errors into TransportError."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"{what} failed, because another rank ended or cannot be reached: {error}") from error


def _device() -> torch.device:
    """This rank's GPU, where there are any and the process group, if there is one already, can use them; else the CPU."""
    if not torch.cuda.is_available() or (dist.is_initialized() and "cuda:nccl" not in dist.get_backend_config()):
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise TransportError(f"local rank {local} has no GPU of its own: this host has {count}; start {count} ranks on it at most")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


class _Groups:
    """The groups that meshes of this process made, by their ranks: a second engine talks over the first one's connections and threads."""

    def __init__(self) -> None:
        self._world: object = None
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
        """A process group of `ranks`, apart from the default one, which is the user's."""
        if self._world is not dist.group.WORLD:
            self.forget()
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), timeout=timeout)
        return self._made[ranks]

    def forget(self) -> None:
        """Make groups anew from now on: the process group is another, or its groups were destroyed."""
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self._made.clear()


GROUPS = _Groups()
atexit.register(GROUPS.forget)


class _Unsettled:
    """Keeps the inputs of operations that others of this host may still have to read, whatever becomes of who began them."""

    def __init__(self) -> None:
        self._held: deque[tuple[Work, Sequence[Tensor]]] = deque()

    def hold(self, work: Work, inputs: Sequence[Tensor]) -> None:
        while self._held and self._held[0][0].is_settled():
            self._held.popleft()
        self._held.append((work, inputs))


UNSETTLED = _Unsettled()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sum_into(out: Tensor, parts: Sequence[Tensor], accumulate: bool) -> None:
    """out = (out +) parts[0] + parts[1] + ..., in that order, element by element, in `out`'s dtype. Parts may alias `out`."""
    if len(parts) == 1 and not accumulate:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if len(parts) == 2 and not accumulate and all(part.dtype == out.dtype for part in parts):
        torch.add(parts[0], parts[1], out=out)
        return
    chunk = CHUNK if out.device.type == "cpu" else max(out.numel(), 1)
    size = min(chunk, out.numel())
    total, wide = torch.empty(2, size, dtype=out.dtype, device=out.device)
    for start in range(0, out.numel(), chunk):
        stop = min(start + chunk, out.numel())
        acc, operand = total[: stop - start], wide[: stop - start]
        acc.copy_(parts[0][start:stop])
        for part in parts[1:]:  # converted first: a mixed-dtype add is several times slower than a copy and an add
            acc.add_(part[start:stop] if part.dtype == out.dtype else operand.copy_(part[start:stop]))
        if accumulate:
            out[start:stop].add_(acc)
        else:
            out[start:stop].copy_(acc)
