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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, NoReturn, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.across_hosts import AcrossHosts
from polyreme.distributed.backend import Backend
from polyreme.distributed.gloo_direct import GlooDirect
from polyreme.distributed.process_group import (
    TIMEOUT,
    WITHIN,
    ProcessGroup,
    groups,
    join,
    of_cpus,
    other_backend,
    world,
)
from polyreme.distributed.simulated import Simulated
from polyreme.distributed.sums import put, sum_into
from polyreme.distributed.watch import Watch
from polyreme.distributed.work import DONE, Work
from polyreme.distributed.world import CLOSED, Resource, current
from polyreme.errors import ModelError, TransportError
from polyreme.files.machine import boot
from polyreme.layout.mesh_axes import AXES, ROLES, lines
from polyreme.observer import OBSERVER

SIZE, SHORT = 8, 2040
"""Bytes of the length that precedes an exchanged object, and of the object's beginning that is sent with the
length. Most objects are shorter and need no second exchange."""


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
    """The ranks that hold the same shards as this one, where the shards are held in several copies
    (`hybrid.Hybrid`)."""

    def __init__(self, name: str, size: int = 1, rank: int = 0, backend: Backend | None = None) -> None:
        """`backend` moves the tensors. Without one the axis simulates ranks that do not exist
        (`simulated`)."""
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
        """Fill `full` (n * s elements) with every rank's `shard` (s elements) in rank order.

        `shard` may be this rank's chunk of `full`; then it is not copied. `of` names the operation in errors,
        and tells it from others: an exchange fails between ranks that give different names."""
        if self.size == 1 or shard.numel() == 0:
            put(full, shard)
            return DONE
        self._count("all_gather", (self.size - 1) * _bytes(shard))
        return self.backend.all_gather(full, shard, of)

    def gathered(self, shard: Tensor, size: int | None = None) -> Tensor:
        """Return every rank's `shard` in rank order, in a new tensor; or `shard` itself if it already has
        `size` elements."""
        if shard.numel() == size:
            return shard
        full = shard.new_empty(self.size * shard.numel())
        self.all_gather(full, shard).settle()
        return full

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False, of: str = "") -> Work:
        """Sum `full` (n * s elements) over the ranks; this rank's shard of the sum goes to `out` (s
        elements), in `out`'s dtype.

        With `accumulate` the sum is added to what `out` holds. `full` must stay untouched until the work is
        done; `out` may be this rank's chunk of it."""
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
        """Give every rank its chunk of `sent`, and fill `received` with the chunks that the ranks give to
        this one, in rank order.

        Without sizes all chunks have equally many elements. `sent_sizes` and `received_sizes` give the
        elements of each chunk, which may be 0; what one rank sends to another has the size that the other
        expects. `of` names the operation in errors.

        `sent` must stay untouched until the work is done. Raises ValueError where the sizes do not add up to
        the tensor's."""
        taken, given = self._chunks(received, received_sizes), self._chunks(sent, sent_sizes)
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
        """Return the value that rank `source` sends by `send_object`."""
        size = torch.empty(1, dtype=torch.int64, device=self.backend.device)
        self.receive(size, source).wait()
        text = torch.empty(int(size), dtype=torch.uint8, device=self.backend.device)
        self.receive(text, source).wait()
        return json.loads(bytes(text.tolist()))

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's `value` (what JSON can hold), in rank order. For set-up and error reports, not
        for training."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        gather = self.backend.gather_bytes
        firsts = gather(len(text).to_bytes(SIZE, "little") + text[:SHORT].ljust(SHORT))
        sizes = [int.from_bytes(first[:SIZE], "little") for first in firsts]
        longest = max(sizes)
        rests = [b""] * self.size if longest <= SHORT else gather(text[SHORT:].ljust(longest - SHORT))
        texts = zip(firsts, rests, sizes, strict=True)
        return [json.loads((first[SIZE:] + rest)[:size]) for first, rest, size in texts]

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=self.backend.device)).settle()

    def alone(self, source: int = 0) -> float:
        """Return the factor by which each rank multiplies a number so that an all-reduce returns that of rank
        `source` alone: 1 there and 0 elsewhere. A simulated all-reduce multiplies by the axis' size, so there
        the factor is 1 / size."""
        if isinstance(self.backend, Simulated):
            return 1 / self.size
        return float(self.rank == source)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat, uninitialised tensor that ranks of this host can read, so that exchanging it needs
        no copy."""
        return self.backend.empty(size, dtype, device)

    def _chunks(self, tensor: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
        sizes = sizes or [tensor.numel() // self.size] * self.size
        if sum(sizes) != tensor.numel():
            known = ", ".join(map(str, sizes))
            raise ValueError(f"parts of {known} elements are not a tensor of {tensor.numel()}")
        return tensor.split([*sizes])

    def _count(self, operation: str, sent: int) -> None:
        count = self.counts[operation]
        count.calls += 1
        count.bytes += sent


@dataclass
class Mesh:
    """All axes of a run. `mesh.dp`, `mesh.tp`, ... are `Axis`; axes that a run does not use have size 1. Axes
    by role are properties: `data`, `loss`, `shard`, `replicate`."""

    rank: int
    world_size: int
    device: torch.device
    sizes: Mapping[str, int]
    order: Sequence[str] = AXES
    axes: dict[str, Axis] = field(default_factory=dict)
    _timeout: timedelta = TIMEOUT
    _shared_memory: bool = False
    _backend: str | None = None
    host_of: Sequence[str] = ("this one",)
    """The name of each rank's host, by rank."""
    has_numbers: bool = True
    """Whether tensors hold numbers. A simulated rank on the meta device has only shapes and counts."""
    stands_for: torch.device | None = None
    """The device that computes in the run that a rank is simulated of; None: `device`."""
    _made: dict[tuple[Any, ...], Axis] = field(default_factory=dict)
    """Axes that were made in addition to `axes`."""
    split_lines: dict[str, list[int]] = field(default_factory=dict)
    """The global ranks of each axis of this rank that `split` made, by its name."""
    _shard: Axis | None = None

    @property
    def computes_on(self) -> str:
        """The type of the device that computes, in the run itself."""
        return (self.stands_for or self.device).type

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
    ) -> Self:
        """Build the axes over all ranks; `sizes` gives each axis' size, and their product is the world size.

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
        mesh = cls(rank, world_size, device, sizes, order, {}, timeout, shared_memory, other)
        mesh._build()
        mesh.host_of = names_apart(mesh.gather_objects([socket.gethostname(), boot()]))
        current().of(Watch).hosts = mesh.host_of
        return mesh

    @property
    def data(self) -> Axis:
        """The ranks that train on different samples."""
        return self.axis("data")

    @property
    def loss(self) -> Axis:
        """The ranks that train on different tokens, of the same samples or of others: the loss is a mean over
        them."""
        return self.axis("loss")

    @property
    def shard(self) -> Axis:
        """The ranks over which ZeRO shards: those of `loss`, or fewer (`hybrid.sharing`)."""
        return self._shard or self.loss

    @property
    def replicate(self) -> Axis:
        """The ranks that hold the same shards as this one."""
        return self.shard.replicas or Axis("dp_replicate")

    @property
    def world(self) -> Axis:
        """All ranks."""
        return self.axis(*AXES)

    def axis(self, *names: str) -> Axis:
        """Return the axis over the ranks that differ from this one only in their places on the named axes, in
        the order of their global ranks. A name may also be a role (`mesh_axes.ROLES`). The first call with
        these names is collective: all ranks must make it."""
        wanted = {each for name in names for each in ROLES.get(name, (name,))}
        several = tuple(name for name in AXES if name in wanted and self.axes[name].size > 1)
        if len(several) < 2:
            return self.axes[several[0] if several else min(wanted)]
        if several not in self._made:
            self._made[several] = self._over(" x ".join(several), self.lines(*several))
        return self._made[several]

    def share(self, axis: Axis) -> Axis:
        """Make `axis` the one over which ZeRO shards."""
        self._shard = axis
        return axis

    def split(self, name: str, size: int, names: tuple[str, str]) -> tuple[Axis, Axis]:
        """Return the two axes, with these names, whose product is the axis `name`: the first over each `size`
        neighbours on it, the second over the ranks in the same place among their neighbours. The first call
        is collective over all ranks."""
        if (name, size, names[0]) not in self._made:
            blocks = [
                [line[start : start + size] for start in range(0, len(line), size)]
                for line in self.lines(name)
            ]
            across = [[*ranks] for line in blocks for ranks in zip(*line, strict=True)]
            for each, parts in zip(names, ([*chain(*blocks)], across), strict=True):
                self._made[name, size, each] = self._over(each, parts)
                self.split_lines[each] = next(ranks for ranks in parts if self.rank in ranks)
        return self._made[name, size, names[0]], self._made[name, size, names[1]]

    def among(self, name: str, places: Sequence[int]) -> Axis:
        """Return an axis over the ranks at these `places` of axis `name`, counting its traffic as that axis';
        for ranks elsewhere an axis of size 1. All ranks must call."""
        found = self._over(name, [[line[place] for place in places] for line in self.lines(name)])
        found.counts = self.axes[name].counts
        return found

    def lines(self, *names: str) -> list[list[int]]:
        """Return the lists of global ranks, one for each group of ranks that `axis` with these names
        joins."""
        return lines(self.sizes, self.order, *(each for name in names for each in ROLES.get(name, (name,))))

    def _build(self) -> None:
        self.axes.update({name: self._over(name, self.lines(name)) for name in AXES})

    def _over(self, name: str, lines: Sequence[Sequence[int]]) -> Axis:
        """Return an axis over the line, of these lines of global ranks, that holds this rank."""
        found = Axis(name)
        for ranks in lines:
            if len(ranks) > 1:
                # collective: all ranks make every group
                group = groups().of(tuple(ranks), self._timeout, self._backend)
                if self.rank in ranks:
                    at = [*ranks].index(self.rank)
                    found = _axis(
                        name, len(ranks), at, group, self._timeout, self._shared_memory, self.device
                    )
        return found

    def places(self, rank: int) -> dict[str, int]:
        """Return the place of a global rank on the axes `loss`, `tp` and `pp`."""
        return {
            name: next(line.index(rank) for line in self.lines(name) if rank in line)
            for name in ("loss", "tp", "pp")
        }

    def gather_objects(self, value: object) -> list[Any]:
        """Return the `value` of every rank of the mesh (what JSON can hold), in the order of the ranks."""
        return self.world.gather_objects(value)

    def receive_object(self, axis: Axis, source: int, expected: Callable[[], Any]) -> Any:
        """Return the value that rank `source` of `axis` sends. A simulated rank, to which nobody sends,
        returns `expected()`."""
        return axis.receive_object(source)

    def control_axis(self) -> Axis:
        """Return an axis over all ranks, between CPUs, for exchanges beside training, perhaps in another
        thread. All ranks must call."""
        return everyone(self._timeout)

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return (calls, bytes sent by this rank) since the start, by axis and operation."""
        return {
            axis.name: {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}
            for axis in self._all()
            if axis.counts
        }

    def _all(self) -> Iterator[Axis]:
        yield from (*self.axes.values(), *self._made.values())


class SimulatedAxis(Axis):
    """An axis of a simulated rank, which tells an observer what it begins, and when it is waited for."""

    backend: Simulated

    def receive(self, tensor: Tensor, source: int) -> Work:
        self._tell("receive", _bytes(tensor))
        return super().receive(tensor, source)

    def _count(self, operation: str, sent: int) -> None:
        super()._count(operation, sent)
        self._tell(operation, sent)

    def _tell(self, verb: str, nbytes: int) -> None:
        if (observer := OBSERVER.get()) is not None:
            self.backend.waited = observer.collective(self.name, verb, nbytes, self.size)


class SimulatedMesh(Mesh):
    """The mesh of one rank of a run that does not exist: each other rank is taken to give what this one gives
    (`simulated`). Communication: none."""

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        order: Sequence[str],
        rank: int,
        device: torch.device,
        has_numbers: bool = True,
        stands_for: torch.device | None = None,
        per_host: int | None = None,
    ) -> Self:
        """Return the mesh of rank `rank`, where each host has `per_host` ranks; by default as many as this
        one has GPUs, or all ranks where it has none. `has_numbers`: whether tensors hold numbers; on the meta
        device they never do. stands_for: the device of the run, by default `device`, or a CPU for the meta
        device."""
        world_size = math.prod(sizes.values())
        if not 0 <= rank < world_size:
            raise TransportError(f"there is no rank {rank} of {world_size}: they are 0 to {world_size - 1}")
        each = per_host or torch.cuda.device_count() or world_size
        hosts = [f"host {other // each}" for other in range(world_size)]
        has_numbers = has_numbers and device.type != "meta"
        if stands_for is None and device.type == "meta":
            stands_for = torch.device("cpu")
        mesh = cls(rank, world_size, device, sizes, order, host_of=hosts, has_numbers=has_numbers)
        mesh.stands_for = stands_for
        mesh._build()
        return mesh

    def _over(self, name: str, lines: Sequence[Sequence[int]]) -> Axis:
        ranks = next((ranks for ranks in lines if self.rank in ranks), [self.rank])
        at = [*ranks].index(self.rank)
        return SimulatedAxis(name, len(ranks), at, Simulated(len(ranks), at, self.computes_on))

    def gather_objects(self, value: object) -> list[Any]:
        return [value]

    def receive_object(self, axis: Axis, source: int, expected: Callable[[], Any]) -> Any:
        before = [
            (each, {name: replace(count) for name, count in each.counts.items()}) for each in self._all()
        ]
        try:
            return expected()
        finally:  # its traffic is that of another rank
            for each, counts in before:
                each.counts.clear()
                each.counts.update(counts)

    def control_axis(self) -> Axis:
        return Axis("control", self.world_size, self.rank)


def everyone(timeout: timedelta = TIMEOUT, within: timedelta = WITHIN, backend: str = "auto") -> Axis:
    """Return an axis over all ranks, between CPUs, apart from those of any mesh. All ranks must call,
    `within` that time of each other where there is no process group yet. Raises as `Mesh.open`."""
    join(timeout, within, backend)
    size, rank = world()
    if size == 1:
        return Axis("control")
    group = groups().of(tuple(range(size)), timeout, of_cpus() or "gloo")
    return _axis("control", size, rank, group, timeout, False, torch.device("cpu"))


def _axis(
    name: str,
    size: int,
    rank: int,
    group: dist.ProcessGroup,
    timeout: timedelta,
    shared_memory: bool,
    device: torch.device,
) -> Axis:
    """Return an axis over the ranks of `group`, for tensors on `device`."""
    if not exchanges_directly(group):
        axis = Axis(name, size, rank, ProcessGroup(name, size, rank, group, device))
    else:
        backend = (AcrossHosts if of_cpus(group) == "mpi" else GlooDirect)(name, size, rank, group)
        axis = Axis(name, size, rank, backend)
        if shared_memory:
            backend.find_neighbours(axis.gather_objects, timeout)
    current().of(OpenAxes).axes.add(axis)
    return axis


class OpenAxes(Resource):
    """The axes of a world that have a backend, to abort and close them with it."""

    def __init__(self) -> None:
        self.axes = WeakSet[Axis]()

    def abort(self, why: str) -> None:
        for axis in [*self.axes]:
            axis.backend.abort(why)

    def close(self) -> None:
        """Stop all axes, also those of engines that are closed, and release the buffers and connections of
        their backends."""
        for axis in [*self.axes]:
            axis.backend.close()
            axis.backend = _Closed()  # type: ignore[assignment]


class _Closed:
    """The `Backend` of an axis whose world is closed: each use raises TransportError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise TransportError(CLOSED)


def exchanges_directly(group: dist.ProcessGroup) -> bool:
    """Return whether ranks of the group exchange numbers themselves (`gloo_direct`), rather than by the
    group's own collectives."""
    return bool(of_cpus(group))


def names_apart(found: Sequence[Sequence[str]]) -> list[str]:
    """Return the host names of (name, machine) pairs; where several machines have the same name, each with
    its machine."""
    machines = defaultdict[str, set[str]](set)
    for name, machine in found:
        machines[name].add(machine)
    return [name if len(machines[name]) == 1 else f"{name} ({machine[:8]})" for name, machine in found]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
