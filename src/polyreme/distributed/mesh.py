"""Named axes over the ranks, and every collective that Polyreme uses. With `transport`, on which it stands,
the one importer of `torch.distributed` in the engine.

Invariants: every rank of an axis issues the same operations on it in the same order; an axis of size 1 moves
nothing.

Communication: on CPU ranks (gloo) all-gather, reduce-scatter and all-reduce are direct exchanges
(`transport.direct`), whose sums do not depend on where in a buffer a number lies; on other backends they are
the backend's own."""

from __future__ import annotations

import atexit
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.environment import detect
from polyreme.distributed.gloo_direct import TAGS, DirectExchange, put, sum_into
from polyreme.distributed.watch import WATCH, Meeting
from polyreme.distributed.work import DONE, Work, reporting
from polyreme.errors import ModelError, TransportError
from polyreme.layout.mesh_axes import AXES, lines

SIZE, SHORT = 8, 2040
"""Bytes of a length, and of the beginning of an object that is exchanged with it: most are no longer.
Together they are less than `transport.direct.SMALL`: sockets carry them."""


@dataclass
class Count:
    """Calls of one operation on one axis, and the bytes that this rank sent in them."""

    calls: int = 0
    bytes: int = 0


class Axis:
    """One named axis of the mesh as this rank sees it: the ranks that differ only in this coordinate.

    All tensors are flat and contiguous. Bytes are counted as sent by this rank: (n-1) shards for an
    all-gather and for a reduce-scatter, and for an all-reduce (n-1) times the tensor in a direct exchange,
    2(n-1)/n of it by a backend.

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
        self._direct: DirectExchange | None = None
        if group is not None and dist.get_backend(group) == "gloo":
            self._direct = DirectExchange(name, size, rank, group)
            if shared_memory:
                self._direct.meet(self.gather_objects, timeout)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ModelError(
            f"a module that communicates over {self.name} cannot be copied: "
            "engine.state_dict() has whole copies of its weights, which "
            "a model that is built anew takes by load_state_dict"
        )

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, size={self.size}, rank={self.rank})"

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> Work:
        """Fill `full` (n * s elements) with every rank's `shard` (s elements) in rank order. `of` names it in
        errors, and tells it from others: ranks that give different ones do not meet.

        `shard` may be this rank's part of `full`; then it is not copied."""
        if self.size == 1 or shard.numel() == 0:
            put(full, shard)
            return DONE
        self._count("all_gather", (self.size - 1) * _bytes(shard))
        if self._direct is not None:
            return self._direct.all_gather(full, shard, of)
        put(full.chunk(self.size)[self.rank], shard)
        # renamed in torch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Work(
            [gather(full, shard, group=self._group, async_op=True)], what=f"all-gather over {self.name}"
        )

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False, of: str = "") -> Work:
        """Sum `full` (n * s elements) over the ranks; this rank's part of the sum goes to `out` (s elements),
        in `out`'s dtype.

        With `accumulate` the sum is added to what `out` holds. `full` must stay untouched until the work is
        done; `out` may be this rank's part of it."""
        if self.size == 1 or out.numel() == 0:
            sum_into(out, [full], accumulate)
            return DONE
        self._count("reduce_scatter", (self.size - 1) * _bytes(full) // self.size)
        if self._direct is not None:
            return self._direct.reduce_scatter(out, full, accumulate, of)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        what = f"reduce-scatter over {self.name}"
        if out.dtype == full.dtype and not accumulate:
            return Work([scatter(out, full, group=self._group, async_op=True)], what=what)
        wide = full if full.dtype == out.dtype else full.to(out.dtype)
        part = torch.empty_like(out)
        pending = [scatter(part, wide, group=self._group, async_op=True)]
        return Work(pending, lambda: sum_into(out, [part], accumulate), what)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` (contiguous, of any shape) over the ranks in place; the result is the same to the last
        bit on every rank."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        if self._direct is not None:
            self._count("all_reduce", (self.size - 1) * _bytes(tensor))
            return self._direct.all_reduce(tensor.view(-1))
        self._count("all_reduce", 2 * (self.size - 1) * _bytes(tensor) // self.size)
        return Work(
            [dist.all_reduce(tensor, group=self._group, async_op=True)], what=f"all-reduce over {self.name}"
        )

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` (contiguous, of any shape and dtype) of rank `source` of this axis to all its
        ranks."""
        if self.size == 1 or tensor.numel() == 0:
            return
        self._count("broadcast", _bytes(tensor) * (self.rank == source))
        flat, what = tensor.view(-1).view(torch.uint8), f"broadcast over {self.name}"
        with reporting(what):
            if self._direct is None:
                dist.broadcast(flat, group=self._group, group_src=source)
                return
            if self.rank == source:
                pending = [
                    dist.isend(flat, group=self._group, group_dst=to)
                    for to in range(self.size)
                    if to != source
                ]
            else:
                pending = [dist.irecv(flat, group=self._group, group_src=source)]
        Work(pending, what=what, meeting=self._meeting).wait()

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send a contiguous `tensor` to rank `to` of this axis. Sends between two ranks arrive in
        the order of their receives."""
        self._count("send", _bytes(tensor))
        with reporting(what := f"send over {self.name}"):
            return Work(
                [dist.isend(tensor, group=self._group, group_dst=to, tag=TAGS)],
                what=what,
                meeting=self._meeting,
            )

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to fill a contiguous `tensor` with what rank `source` sends."""
        with reporting(what := f"receive over {self.name}"):
            return Work(
                [dist.irecv(tensor, group=self._group, group_src=source, tag=TAGS)],
                what=what,
                meeting=self._meeting,
            )

    def send_object(self, value: object, to: int) -> None:
        """Send `value` (what JSON can hold) to rank `to`, and wait until it has it."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()]), text):
            self.send(tensor.cuda() if self._direct is None else tensor, to).settle()

    def receive_object(self, source: int) -> Any:
        """What rank `source` sends."""
        device = torch.device("cuda") if self._direct is None else None
        size = torch.empty(1, dtype=torch.int64, device=device)
        self.receive(size, source).wait()
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
        self.receive(text, source).wait()
        return json.loads(bytes(text.tolist()))

    def gather_objects(self, value: object) -> list[object]:
        """Every rank's `value` (what JSON can hold), in rank order. For set-up and error reports, not for
        training."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        firsts = self._all(len(text).to_bytes(SIZE, "little") + text[:SHORT].ljust(SHORT))
        sizes = [int.from_bytes(first[:SIZE], "little") for first in firsts]
        rests = (
            [b""] * self.size if max(sizes) <= SHORT else self._all(text[SHORT:].ljust(max(sizes) - SHORT))
        )
        return [
            json.loads((first[SIZE:] + rest)[:size])
            for first, rest, size in zip(firsts, rests, sizes, strict=True)
        ]

    def _all(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, of the same size everywhere."""
        tensor, what = torch.frombuffer(bytearray(data), dtype=torch.uint8), "gathering reports"
        if self._direct is not None:
            received = self._direct.gather(tensor, what)
        else:
            there = tensor.cuda()
            received = [torch.empty_like(there) for _ in range(self.size)]
            with reporting(f"{what} over {self.name}"):
                dist.all_gather(received, there, group=self._group)
        return [each.cpu().numpy().tobytes() for each in received]

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1)).settle()

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor, not initialised, that ranks of this host can read: it is exchanged without a
        copy."""
        if self._direct is not None and device.type == "cpu":
            return self._direct.empty(size, dtype)
        with torch.inference_mode(False):  # the user's may be on, and the tensor is written to after it
            return torch.empty(size, dtype=dtype, device=device)

    @property
    def _meeting(self) -> Meeting | None:
        return None if self._direct is None else self._direct.meeting

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
    _shared_memory: bool = False

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

        Joins the process group that exists, or else the one that the environment (RANK, WORLD_SIZE,
        MASTER_ADDR, ...) describes; without either, one process is the whole world. With `shared_memory`, CPU
        ranks of one host read each other's memory. Raises TransportError where the ranks cannot meet."""
        device = _join(timeout)
        world_size, rank = world()
        if math.prod(sizes.values()) != world_size:
            size = math.prod(sizes.values())
            raise TransportError(
                f"the axes {dict(sizes)} make {size} ranks, but there are {world_size}: "
                f"start {size}, with `polyreme launch -n {size} SCRIPT`, or choose other sizes"
            )
        axes = {name: Axis(name) for name in AXES}
        all_lines = {name: lines(sizes, order, name) for name in order}
        for name in order:
            for ranks in all_lines[name]:
                if len(ranks) > 1:
                    group = GROUPS.of(tuple(ranks), timeout)  # every rank takes part in making every group
                    if rank in ranks:
                        axes[name] = Axis(name, len(ranks), ranks.index(rank), group, timeout, shared_memory)
        return cls(rank, world_size, device, axes, all_lines, timeout, shared_memory)

    def part(self, name: str, ranks: Sequence[int]) -> Axis:
        """An axis of its own over some `ranks` of axis `name`; of size 1 on the others. All ranks of the mesh
        must call."""
        mine = self.axes[name]
        if len(ranks) == 1 or mine.size == 1:
            return Axis(name)
        found = Axis(name)
        for line in self._lines[name]:
            group = GROUPS.of(tuple(line[rank] for rank in ranks), self._timeout)
            if self.rank in line and mine.rank in ranks:
                found = Axis(
                    name, len(ranks), list(ranks).index(mine.rank), group, self._timeout, self._shared_memory
                )
                found.counts = mine.counts
        return found

    def aside(self) -> Axis:
        """An axis over all ranks, between CPUs, for what goes on beside training in another thread. All ranks
        must call."""
        return everyone(self._timeout)

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Since the start, by axis and operation: (calls, bytes sent by this rank)."""
        return {
            name: {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}
            for name, axis in self.axes.items()
            if axis.counts
        }


def everyone(timeout: timedelta = timedelta(minutes=10)) -> Axis:
    """An axis over all ranks, between CPUs, apart from those of any mesh. All ranks must call. Raises as
    `Mesh.open`."""
    _join(timeout)
    size, rank = world()
    if size == 1:
        return Axis("aside")
    return Axis("aside", size, rank, GROUPS.of(tuple(range(size)), timeout, "gloo"), timeout)


def _join(timeout: timedelta) -> torch.device:
    """Open the process group that the environment describes, unless there is one. Returns this rank's
    device."""
    device = _device()
    if not dist.is_initialized() and world()[0] > 1:
        try:
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo", timeout=timeout
            )
            atexit.register(close)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"the ranks could not meet: {error}") from error
    return device


def world() -> tuple[int, int]:
    """(world size, rank) of the process group, or (1, 0) without one; before it is opened, as the environment
    says.

    Raises LaunchError where that does not tell."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    place = detect()
    return place.world_size, place.rank


def close() -> None:
    """Leave the process group, if there is one."""
    GROUPS.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    """This rank's GPU, where there are any and the process group, if there is one already, can use them; else
    the CPU."""
    if not torch.cuda.is_available() or (
        dist.is_initialized() and "cuda:nccl" not in dist.get_backend_config()
    ):
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise TransportError(
            f"local rank {local} has no GPU of its own: this "
            f"host has {count}; start {count} ranks on it at most"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


class _Groups:
    """The groups that meshes of this process made, by their ranks: a second engine talks over the first one's
    connections and threads."""

    def __init__(self) -> None:
        self._world: object = None
        self._made: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
        """A process group of `ranks`, apart from the default one, which is the user's; with `backend`, also
        from those without."""
        if self._world is not dist.group.WORLD:
            self.forget()
        if dist.get_backend() == "gloo" or backend == "gloo":
            WATCH.begin()
        if (ranks, backend) not in self._made:
            self._made[ranks, backend] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        return self._made[ranks, backend]

    def forget(self) -> None:
        """Make groups anew from now on: the process group is another, or its groups were destroyed."""
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self._made.clear()
        WATCH.forget()


GROUPS = _Groups()
atexit.register(GROUPS.forget)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
