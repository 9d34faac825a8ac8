"""The mesh: named axes over the ranks, and every collective that Polyreme uses, over whichever `Backend`
moves tensors.

Invariants: every rank of an axis issues the same operations on it in the same order; an axis of size 1 moves
nothing.

Communication: between CPUs direct exchanges (`gloo_direct`), whose sums do not depend on where in a buffer a
number lies; elsewhere the process group's own collectives (`process_group`)."""

from __future__ import annotations

import json
import math
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.across_hosts import AcrossHosts
from polyreme.distributed.backend import Backend
from polyreme.distributed.gloo_direct import GlooDirect
from polyreme.distributed.process_group import (
    GROUPS,
    TIMEOUT,
    WITHIN,
    ProcessGroup,
    join,
    of_cpus,
    other_backend,
    world,
)
from polyreme.distributed.simulated import Simulated
from polyreme.distributed.sums import put, sum_into
from polyreme.distributed.watch import WATCH
from polyreme.distributed.work import DONE, Work
from polyreme.errors import ModelError, TransportError
from polyreme.files.machine import boot
from polyreme.layout.mesh_axes import AXES, lines

SIZE, SHORT = 8, 2040
"""Bytes of a length, and of the beginning of an object that is exchanged with it: most are no longer."""


@dataclass
class Count:
    """Calls of one operation on one axis, and the bytes that this rank sent in them."""

    calls: int = 0
    bytes: int = 0


class Axis:
    """One named axis of the mesh as this rank sees it: the ranks that differ only in this coordinate.

    All tensors are flat and contiguous. Bytes are counted as sent by this rank: (n-1) shards for an
    all-gather and for a reduce-scatter, and for an all-reduce what its backend sends.

    Every operation raises TransportError where a rank has ended or cannot be reached."""

    replicas: Axis | None = None
    """The ranks that hold the same shards as this one, where the axis is one of several copies
    (`hybrid.Hybrid`)."""

    def __init__(self, name: str, size: int = 1, rank: int = 0, backend: Backend | None = None) -> None:
        """`backend` moves the tensors; an axis without one plans for ranks that are not there."""
        self.name, self.size, self.rank = name, size, rank
        self.counts: dict[str, Count] = defaultdict(Count)
        self.backend: Backend = Simulated(size, rank) if backend is None else backend

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ModelError(
            f"a module that communicates over {self.name} cannot be copied: engine.state_dict() has whole "
            "copies of its weights, which a model that is built anew takes by load_state_dict"
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
        return self.backend.all_gather(full, shard, of)

    def gathered(self, part: Tensor, size: int | None = None) -> Tensor:
        """Every rank's `part` in rank order, in a new tensor; `part` itself if it has `size` elements
        already."""
        if part.numel() == size:
            return part
        full = part.new_empty(self.size * part.numel())
        self.all_gather(full, part).settle()
        return full

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False, of: str = "") -> Work:
        """Sum `full` (n * s elements) over the ranks; this rank's part of the sum goes to `out` (s elements),
        in `out`'s dtype.

        With `accumulate` the sum is added to what `out` holds. `full` must stay untouched until the work is
        done; `out` may be this rank's part of it."""
        if self.size == 1 or out.numel() == 0:
            sum_into(out, [full], accumulate)
            return DONE
        self._count("reduce_scatter", (self.size - 1) * _bytes(full) // self.size)
        return self.backend.reduce_scatter(out, full, accumulate, of)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
        of: str = "",
    ) -> Work:
        """Give every rank its part of `sent`, and fill `received` with the parts that the ranks give to this
        one, in rank order. Parts are of equal sizes, or have these many elements, which may be none: what
        one rank gives to another is what that one takes of it. `of` names it in errors.

        `sent` must stay untouched until the work is done. Raises ValueError where sizes do not add up."""
        taken, given = self._parts(received, received_sizes), self._parts(sent, sent_sizes)
        if self.size == 1:
            put(received, sent)
            return DONE
        self._count("all_to_all", _bytes(sent) - _bytes(given[self.rank]))
        return self.backend.all_to_all(taken, given, of)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` (contiguous, of any shape) over the ranks in place; the result is the same to the last
        bit on every rank."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        self._count("all_reduce", self.backend.bytes_of_all_reduce(_bytes(tensor)))
        return self.backend.all_reduce(tensor.view(-1))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` (contiguous, of any shape and dtype) of rank `source` of this axis to all its
        ranks."""
        if self.size > 1 and tensor.numel():
            self._count("broadcast", _bytes(tensor) * (self.rank == source))
            self.backend.broadcast(tensor.view(-1).view(torch.uint8), source).wait()

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send a contiguous `tensor` to rank `to` of this axis. Sends between two ranks arrive in
        the order of their receives."""
        self._count("send", _bytes(tensor))
        return self.backend.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to fill a contiguous `tensor` with what rank `source` sends."""
        return self.backend.receive(tensor, source)

    def send_object(self, value: object, to: int) -> None:
        """Send `value` (what JSON can hold) to rank `to`, and wait until it has it."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()]), text):
            self.send(tensor.to(self.backend.device), to).settle()

    def receive_object(self, source: int) -> Any:
        """What rank `source` sends."""
        size = torch.empty(1, dtype=torch.int64, device=self.backend.device)
        self.receive(size, source).wait()
        text = torch.empty(int(size), dtype=torch.uint8, device=self.backend.device)
        self.receive(text, source).wait()
        return json.loads(bytes(text.tolist()))

    def gather_objects(self, value: object) -> list[Any]:
        """Every rank's `value` (what JSON can hold), in rank order. For set-up and error reports, not for
        training."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        gather = self.backend.gather_bytes
        firsts = gather(len(text).to_bytes(SIZE, "little") + text[:SHORT].ljust(SHORT))
        sizes = [int.from_bytes(first[:SIZE], "little") for first in firsts]
        longest = max(sizes)
        rests = [b""] * self.size if longest <= SHORT else gather(text[SHORT:].ljust(longest - SHORT))
        parts = zip(firsts, rests, sizes, strict=True)
        return [json.loads((first[SIZE:] + rest)[:size]) for first, rest, size in parts]

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=self.backend.device)).settle()

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor, not initialised, that ranks of this host can read: it is exchanged without a
        copy."""
        return self.backend.empty(size, dtype, device)

    def _parts(self, tensor: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
        sizes = sizes or [tensor.numel() // self.size] * self.size
        if sum(sizes) != tensor.numel():
            known = ", ".join(map(str, sizes))
            raise ValueError(f"parts of {known} elements are not a tensor of {tensor.numel()}")
        return tensor.split([*sizes])

    def _count(self, operation: str, sent: int) -> None:
        count = self.counts[operation]
        count.calls += 1
        count.bytes += sent


@dataclass(frozen=True)
class Product:
    """The product of several axes: the ranks that differ in their coordinates alone, in the order of the
    axes, the last of which counts fastest.

    Communication: that of each axis after the other, so that no group of its own is needed."""

    axes: Sequence[Axis]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(axis.size for axis in self.axes)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks in place."""
        for axis in self.axes:
            axis.all_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Copy `tensor` of the first rank to all."""
        for axis in self.axes:
            axis.broadcast(tensor)

    def gather_objects(self, value: object) -> list[Any]:
        """Every rank's `value` (what JSON can hold), in the order of the ranks."""
        values: list[Any] = [value]
        for axis in reversed(self.axes):
            values = [each for there in axis.gather_objects(values) for each in there]
        return values


@dataclass
class Mesh:
    """All axes of a run. `mesh.dp`, `mesh.tp`, ... are Axis; axes that a run does not use have size 1."""

    rank: int
    world_size: int
    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)
    lines: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    _timeout: timedelta = TIMEOUT
    _shared_memory: bool = False
    _backend: str | None = None
    host_of: Sequence[str] = ("this one",)
    """The name of the host that each rank is on."""
    copies: dict[int, Axis] = field(default_factory=dict)
    """Axes over the ranks that share one copy of what is sharded, by their size (`hybrid.sharing`)."""

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that the ranks are on, each once."""
        return sorted({*self.host_of})

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
        timeout: timedelta = TIMEOUT,
        shared_memory: bool = True,
        backend: str = "auto",
    ) -> Mesh:
        """Build the axes over all ranks; `sizes` gives each axis' size and their product is the world size.

        Joins the process group that exists, or else the one that the environment (torchrun's variables,
        MPI's, ...) describes; without either, one process is the whole world. An operation waits `timeout`
        for other ranks. With `shared_memory`, CPU ranks of one host read each other's memory. `backend`: what
        moves tensors, as `mesh.backend` says. Raises TransportError where the ranks cannot meet."""
        device = join(timeout)
        world_size, rank = world()
        if math.prod(sizes.values()) != world_size:
            size = math.prod(sizes.values())
            raise TransportError(
                f"the axes {dict(sizes)} make {size} ranks, but there are {world_size}: "
                f"start {size}, with `polyreme launch -n {size} SCRIPT`, or choose other sizes"
            )
        other = other_backend(backend) if world_size > 1 else None
        axes = {name: Axis(name) for name in AXES}
        all_lines = {name: lines(sizes, order, name) for name in order}
        for name in order:
            for ranks in all_lines[name]:
                if len(ranks) > 1:
                    group = GROUPS.of(tuple(ranks), timeout, other)  # all ranks make every group
                    if rank in ranks:
                        axes[name] = _axis(
                            name, len(ranks), ranks.index(rank), group, timeout, shared_memory, device
                        )
        mesh = cls(rank, world_size, device, axes, all_lines, timeout, shared_memory, other)
        WATCH.hosts = mesh.host_of = names_apart(mesh.gather_objects([socket.gethostname(), boot()]))
        return mesh

    def part(self, name: str, ranks: Sequence[int]) -> Axis:
        """An axis of its own over some `ranks` of axis `name`; of size 1 on the others. All ranks of the mesh
        must call."""
        if len(ranks) == 1 or self.axes[name].size == 1:
            return Axis(name)
        found = self.piece(name, name, [ranks])
        if found.size > 1:
            found.counts = self.axes[name].counts
        return found

    def piece(self, axis: str, name: str, pieces: Sequence[Sequence[int]]) -> Axis:
        """An axis over those of the `pieces` of `axis` that this rank is in. All ranks must call."""
        found = Axis(name)
        for line in self.lines[axis]:
            for piece in pieces:
                ranks = tuple(line[rank] for rank in piece)
                group = GROUPS.of(ranks, self._timeout, self._backend)  # all ranks make every group
                if self.rank in ranks:
                    at = ranks.index(self.rank)
                    found = _axis(
                        name, len(ranks), at, group, self._timeout, self._shared_memory, self.device
                    )
        return found

    def places(self, rank: int) -> dict[str, int]:
        """Where a rank of the mesh is on each axis."""
        return {
            name: next((line.index(rank) for line in self.lines.get(name, ()) if rank in line), 0)
            for name in self.axes
        }

    def product(self, *names: str) -> Product:
        """The product of those of these axes that have several ranks."""
        return Product([axis for name in names if (axis := self.axes[name]).size > 1])

    def gather_objects(self, value: object) -> list[Any]:
        """The `value` of every rank of the mesh (what JSON can hold), rank 0's first."""
        return self.product(*self.axes).gather_objects(value)

    def aside(self) -> Axis:
        """An axis over all ranks, between CPUs, for what goes on beside training in another thread. All ranks
        must call."""
        return everyone(self._timeout)

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """(calls, bytes sent by this rank) since the start, by axis and operation."""
        parts = (part for copy in self.copies.values() for part in (copy, copy.replicas) if part)
        axes = {**self.axes, **{axis.name: axis for axis in parts}}
        return {
            name: {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}
            for name, axis in axes.items()
            if axis.counts
        }


class SimulatedMesh(Mesh):
    """The mesh of a rank of a run that does not exist, for what such a rank has: every other rank is taken to
    give what this one gives (`simulated`). Communication: none."""

    @classmethod
    def of(cls, sizes: Mapping[str, int], order: Sequence[str], rank: int, device: torch.device) -> Self:
        """That of rank `rank`, where each host has as many ranks as this one has GPUs, or all."""
        world_size, all_lines = math.prod(sizes.values()), {name: lines(sizes, order, name) for name in order}
        axes = {name: Axis(name) for name in AXES}
        for name in order:
            line = next(line for line in all_lines[name] if rank in line)
            axes[name] = Axis(name, len(line), line.index(rank))
        each = torch.cuda.device_count() or world_size
        hosts = [f"host {other // each}" for other in range(world_size)]
        return cls(rank, world_size, device, axes, all_lines, host_of=hosts)

    def piece(self, axis: str, name: str, pieces: Sequence[Sequence[int]]) -> Axis:
        found = [piece for piece in pieces if self.axes[axis].rank in piece]
        return Axis(name, len(found[0]), list(found[0]).index(self.axes[axis].rank)) if found else Axis(name)

    def gather_objects(self, value: object) -> list[Any]:
        return [value]

    def aside(self) -> Axis:
        return Axis("aside", self.world_size, self.rank)


def everyone(timeout: timedelta = TIMEOUT, within: timedelta = WITHIN, backend: str = "auto") -> Axis:
    """An axis over all ranks, between CPUs, apart from those of any mesh. All ranks must call, `within` that
    time of each other where there is no process group yet. Raises as `Mesh.open`."""
    join(timeout, within, backend)
    size, rank = world()
    if size == 1:
        return Axis("aside")
    group = GROUPS.of(tuple(range(size)), timeout, of_cpus() or "gloo")
    return _axis("aside", size, rank, group, timeout, False, torch.device("cpu"))


def _axis(
    name: str,
    size: int,
    rank: int,
    group: dist.ProcessGroup,
    timeout: timedelta,
    shared_memory: bool,
    device: torch.device,
) -> Axis:
    """An axis over the ranks of `group`, which moves tensors of `device`."""
    if not exchanges_directly(group):
        return Axis(name, size, rank, ProcessGroup(name, size, rank, group, device))
    backend = (AcrossHosts if of_cpus(group) == "mpi" else GlooDirect)(name, size, rank, group)
    axis = Axis(name, size, rank, backend)
    if shared_memory:
        backend.meet(axis.gather_objects, timeout)
    return axis


def exchanges_directly(group: dist.ProcessGroup) -> bool:
    """Whether ranks of the group exchange numbers themselves, or leave it to the group's own collectives."""
    return bool(of_cpus(group))


def names_apart(found: Sequence[Sequence[str]]) -> list[str]:
    """The host names of (name, machine), with the machine where several have the same name."""
    machines = defaultdict[str, set[str]](set)
    for name, machine in found:
        machines[name].add(machine)
    return [name if len(machines[name]) == 1 else f"{name} ({machine[:8]})" for name, machine in found]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
