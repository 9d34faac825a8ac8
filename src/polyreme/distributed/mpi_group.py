"""A process group of torch.distributed over MPI: the group that `init_process_group("mpi")` and `new_group`
make with a PyTorch that was built without MPI.

Invariants: reductions are taken in rank order for each element by itself, of bf16 and fp16 in fp32; ranks
begin the collectives of a group in the same order. Tensors are of the CPU, of any dtype.

Communication: the library's own nonblocking collectives, of bytes. Reductions exchange the chunks between
each two ranks and reduce them where the result is wanted; an all-reduce of more than SMALL bytes is a
reduce-scatter and an all-gather."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.mpi import PROGRESS, Operation, Step, library, message, refuse_others
from polyreme.distributed.sums import put, sum_into
from polyreme.errors import TransportError

SMALL = 1 << 15
"""Bytes up to which an all-reduce gathers whole tensors, in one exchange instead of two."""
RENDEZVOUS = 1
"""The tag of messages by which members of a new group wait for each other."""


_ProcessGroup: Any = dist.ProcessGroup  # torch's stub is stricter than torch itself


class MpiGroup(_ProcessGroup):
    """The ranks of one MPI communicator. An operation raises TransportError after `timeout`."""

    def __init__(self, comm: Any, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.timeout = timeout
        self._comm, self._size, self._rank = comm, comm.size, comm.rank
        self._own = comm.Dup()  # for exchanges; a message's tag is the exchange's number
        self._begun, self._tags = 0, comm.Get_attr(library().TAG_UB) + 1
        self._name = self._description = ""
        self._aborted = False

    # ---- of one tensor

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Operation:
        steps = [self._all_reduce(tensor, tensor, opts.reduceOp) for tensor in tensors]
        return self._begin("all-reduce", steps, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Operation:
        tensor = tensors[opts.rootTensor]
        to = tensor if self._rank == opts.rootRank else torch.empty_like(tensor)
        return self._begin("reduce", [self._all_reduce(to, tensor, opts.reduceOp)], tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Operation:
        def steps() -> Iterator[Step]:
            tensor = _flat(tensors[opts.rootTensor])
            yield [self._comm.Ibcast(message(tensor), opts.rootRank)]
            _back(tensor, tensors[opts.rootTensor])

        return self._begin("broadcast", [steps()], tensors, opts)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Operation:
        return self._begin("all-gather", [self._all_gather(output, tensor)], [output], opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Operation:
        steps = self._reduce_scatter(output, _flat(tensor).chunk(self._size), opts.reduceOp)
        return self._begin("reduce-scatter", [steps], [output], opts)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, to_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Operation:
        """Exchange chunks along the first dimension, equal ones where no sizes are given."""
        places = output.split(to_sizes or [len(output) // self._size] * self._size)
        return self.alltoall(
            [*places], [*tensor.split(sizes or [len(tensor) // self._size] * self._size)], opts
        )

    # ---- of lists

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Operation:
        def steps(places: list[Tensor], tensor: Tensor) -> Iterator[Step]:
            whole = tensor.new_empty(self._size * tensor.numel())
            yield from self._all_gather(whole, tensor)
            for chunk, place in zip(whole.chunk(self._size), places, strict=True):
                _back(chunk, place)

        each = [steps(places, tensor) for places, tensor in zip(outputs, tensors, strict=True)]
        return self._begin("all-gather", each, [*chain.from_iterable(outputs)], opts)

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Operation:
        steps = [
            self._reduce_scatter(output, [_flat(each) for each in summands], opts.reduceOp)
            for output, summands in zip(outputs, tensors, strict=True)
        ]
        return self._begin("reduce-scatter", steps, outputs, opts)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Operation:
        """Exchange tensors, which may be of different sizes, and empty."""

        def steps() -> Iterator[Step]:
            places = [_flat(each) for each in outputs]
            yield from self._exchange([_flat(each) for each in tensors], places, self._number())
            for place, output in zip(places, outputs, strict=True):
                _back(place, output)

        return self._begin("all-to-all", [steps()], outputs, opts)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Operation:
        def steps() -> Iterator[Step]:
            tensor, root = _flat(tensors[0]), self._rank == opts.rootRank
            whole = tensor.new_empty(self._size * tensor.numel() if root else 0)
            to = message(whole) if root else None
            yield [self._comm.Igather(message(tensor), to, opts.rootRank)]
            for chunk, place in zip(whole.chunk(self._size), outputs[0], strict=True) if root else ():
                _back(chunk, place)

        return self._begin("gather", [steps()], [*chain.from_iterable(outputs)], opts)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Operation:
        def steps() -> Iterator[Step]:
            place, root = _flat(outputs[0]), self._rank == opts.rootRank
            whole = torch.cat([_flat(each) for each in tensors[0]]) if root else None
            chunks = message(whole) if whole is not None else None
            yield [self._comm.Iscatter(chunks, message(place), opts.rootRank)]
            _back(place, outputs[0])

        return self._begin("scatter", [steps()], outputs, opts)

    allreduce_coalesced = allreduce

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> Operation:
        """Gather several tensors. `outputs` has for each rank a tensor for each of `tensors`."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], tensors, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Operation:
        steps = [self._all_gather(output, tensor) for output, tensor in zip(outputs, tensors, strict=True)]
        return self._begin("all-gather", steps, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any
    ) -> Operation:
        return self.reduce_scatter(outputs, [[*_flat(each).chunk(self._size)] for each in tensors], opts)

    # ---- others

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Operation:
        def steps() -> Iterator[Step]:
            yield [self.sending(_flat(tensors[0]), to, tag)]

        return self._begin("send", [steps()], tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Operation:
        status = library().Status()

        def steps() -> Iterator[Step]:
            tensor = _flat(tensors[0])
            request = self.receiving(tensor, source, tag)
            yield lambda: request.Test(status)
            _back(tensor, tensors[0])

        operation = self._begin("receive", [steps()], tensors)
        operation.status = status
        return operation

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Operation:
        return self.recv(tensors, library().ANY_SOURCE, tag)

    def barrier(self, opts: Any = None) -> Operation:
        return self._begin("barrier", [iter([[self._comm.Ibarrier()]])], [], opts)

    def getBackendName(self) -> str:
        return "mpi"

    def getGroupName(self) -> str:
        """Return the name by which device meshes and functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def abort(self) -> None:
        """Break off the operations under way in this process, as `_Progress.abort` does; later ones raise."""
        self._aborted = True
        PROGRESS.abort(self)

    def shutdown(self) -> None:
        """Free the communicators, which MPI has few of; not where an operation failed."""
        if self._comm is not None and not PROGRESS.failed and not library().Is_finalized():
            self._comm.Free()
            self._own.Free()
        self._comm = None

    # their names since torch 2.13, and those before
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- how

    def sending(self, flat: Tensor, to: int, tag: int) -> Any:
        """Begin to send a flat tensor. Returns an MPI request for the steps of an `Operation`, which keeps
        the tensor."""
        return self._comm.Isend(message(flat), to, tag % self._tags)

    def receiving(self, flat: Tensor, source: int, tag: int) -> Any:
        """Begin to fill a flat tensor. Returns an MPI request."""
        return self._comm.Irecv(message(flat), source, tag % self._tags)

    def _begin(
        self, what: str, steps: Sequence[Iterator[Step]], tensors: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        """Begin an operation whose result is in `tensors`."""
        for each in tensors:
            if each.device.type != "cpu":
                raise TransportError(
                    f"the mpi backend has no {what} of tensors on {each.device}: it moves those of the CPU; "
                    "GPUs have nccl"
                )
        asked: timedelta | None = getattr(opts, "timeout", None)
        timeout = asked if asked is not None and asked > timedelta(0) else self.timeout
        return self.operation(f"{what} over MPI", _concurrently(steps), tensors, timeout)

    def operation(
        self,
        what: str,
        steps: Iterator[Step],
        results: Sequence[Tensor] = (),
        timeout: timedelta | None = None,
    ) -> Operation:
        """Begin an operation of this group, with the group's timeout unless another is given."""
        if self._aborted:
            raise TransportError(f"{what} was broken off: this process has aborted the group")
        return Operation(what, steps, timeout or self.timeout, results, self)

    def _number(self) -> int:
        self._begun += 1
        return self._begun % self._tags

    def _exchange(self, chunks: Sequence[Tensor], places: Sequence[Tensor], number: int) -> Iterator[Step]:
        """Give every rank its chunk, and receive theirs into `places`, all flat, as exchange `number`."""
        requests = []
        # each rank starts with a different peer, so that none gets all first messages
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            requests.append(self._own.Irecv(message(places[source]), source, number))
            requests.append(self._own.Isend(message(chunks[to]), to, number))
        put(places[self._rank], chunks[self._rank])
        yield requests

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Iterator[Step]:
        whole, mine = _flat(output), _flat(tensor)
        there = mine.data_ptr() == whole.chunk(self._size)[self._rank].data_ptr() if mine.numel() else True
        yield [self._comm.Iallgather(library().IN_PLACE if there else message(mine), message(whole))]
        _back(whole, output)

    def _reduce_scatter(self, output: Tensor, chunks: Sequence[Tensor], op: Any) -> Iterator[Step]:
        mine = chunks[self._rank]
        places = [mine if rank == self._rank else torch.empty_like(mine) for rank in range(self._size)]
        yield from self._exchange(chunks, places, self._number())
        reduce_into(output, places, op)

    def _all_reduce(self, output: Tensor, tensor: Tensor, op: Any) -> Iterator[Step]:
        mine = _flat(tensor)
        if mine.nbytes <= SMALL:
            whole = mine.new_empty(self._size * mine.numel())
            yield from self._all_gather(whole, mine)
            reduce_into(output, whole.chunk(self._size), op)
            return
        number = self._number()  # taken now, as ranks may begin the second exchange in another order
        chunks, result = mine.tensor_split(self._size), _flat(output)
        places = result.tensor_split(self._size)
        yield from self._reduce_scatter(places[self._rank], chunks, op)
        yield from self._exchange([places[self._rank]] * self._size, places, number)
        _back(result, output)


def reduce_into(output: Tensor, summands: Sequence[Tensor], op: Any) -> None:
    """Reduce `summands` (flat, of one size and dtype) in their order, bf16 and fp16 in fp32. Raises
    TransportError for an unknown reduction."""
    dtype, result = summands[0].dtype, _flat(output)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    # the order matters: op == SUM holds, SUM == op does not
    if (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG) and dtype != torch.bool:
        total = result if result.dtype == wide else torch.empty_like(result, dtype=wide)
        sum_into(total, summands, False)
        if op == dist.ReduceOp.AVG:
            whole = not (wide.is_floating_point or wide.is_complex)
            total.div_(len(summands), rounding_mode="trunc" if whole else None)
    else:
        function = next((each for known, each in _REDUCTIONS if op == known), None)
        if function is None:
            raise TransportError(f"the mpi backend has no reduction {op} of {dtype}")
        total = functools.reduce(function, (summand.to(wide) for summand in summands))
    _back(total, output)


_REDUCTIONS: Sequence[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = (
    (dist.ReduceOp.SUM, torch.logical_or),  # of bool; others are summed above
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


def _concurrently(each: Sequence[Iterator[Step]]) -> Iterator[Step]:
    """Run several operations at the same time."""
    if len(each) == 1:
        yield from each[0]
        return
    left = [(next(steps, None), steps) for steps in each]
    while left := [(step, steps) for step, steps in left if step is not None]:
        yield from (step for step, _ in left)
        left = [(next(steps, None), steps) for _, steps in left]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def _back(flat: Tensor, tensor: Tensor) -> None:
    """Copy a tensor that `_flat` returned back into its original, where it was a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def create(ranks: Sequence[int], timeout: timedelta, size: int = -1, rank: int = -1) -> MpiGroup:
    """Return a group of these ranks of the world, or of all for an empty list; all members must call. `size`
    and `rank` are the world's, as torch has them, where it has any. Raises TransportError where MPI has other
    ranks, or a member does not come within `timeout`."""
    MPI = library(timeout)
    if dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
    if size > 0:
        refuse_others(size, rank, "torch.distributed")
    PROGRESS.longest = max(PROGRESS.longest, timeout)
    world = MPI.COMM_WORLD
    if not ranks or len(ranks) == world.size:
        return MpiGroup(world.Dup(), timeout)
    _meet(world, ranks, timeout)
    members = world.Get_group().Incl(list(ranks))
    comm = world.Create_group(members, RENDEZVOUS)
    members.Free()
    return MpiGroup(comm, timeout)


def _meet(world: Any, ranks: Sequence[int], timeout: timedelta) -> None:
    """Wait for the other members of a group, before all call MPI's constructor, which has no deadline."""

    def steps() -> Iterator[Step]:
        buffer = bytearray(1)
        first, others = ranks[0], ranks[1:]
        if world.rank == first:
            yield [world.Irecv(bytearray(1), rank, RENDEZVOUS) for rank in others]
            yield [world.Isend(buffer, rank, RENDEZVOUS) for rank in others]
        else:
            yield [world.Isend(buffer, first, RENDEZVOUS)]
            yield [world.Irecv(buffer, first, RENDEZVOUS)]

    Operation(f"meeting of ranks {list(ranks)} over MPI", steps(), timeout).wait()
