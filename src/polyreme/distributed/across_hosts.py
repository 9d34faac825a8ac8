"""Direct exchanges over MPI between hosts that have several ranks each: data that all ranks of a host want
crosses the network once, and numbers that a host adds to a sum go on as one where that is less.

Invariants: those of `gloo_direct`; numbers are the same to the last bit as if every rank had sent to every
other one, so that a host only ever adds to the sum of all hosts before it. A rank passes data on whether or
not it waits for it: operations of MPI run by themselves.

Communication: in an all-gather each rank sends its shard to one rank of every other host, whose neighbours
read it there: (hosts - 1) shards instead of (ranks of other hosts). In a sum, ranks in the same place of each
host form a chain: the first host sums its ranks' numbers, each next one adds its own, and the last one sends
results that are wanted elsewhere back. Where no chain is possible, each rank sums a chunk of an all-reduce,
and sends it to all. Over gloo nothing would pass a sum on while its rank waits for something else: there all
data is sent directly."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.gloo_direct import Exchange, GlooDirect
from polyreme.distributed.mpi import Operation, Step
from polyreme.distributed.mpi_group import MpiGroup
from polyreme.distributed.sums import put, sum_into
from polyreme.distributed.work import Work, reporting

SMALL = 4096
"""Bytes of a shard below which each rank sends it directly to every rank of other hosts, in one trip instead
of two."""
LITTLE = 1 << 15
"""Bytes up to which each rank sums for itself: that is one trip, and a chain at least two."""
PIECE, PIECES = 1 << 20, 16
"""Bytes of the pieces in which a sum is passed on, so that hosts work at the same time; and the most
pieces."""


@dataclass(frozen=True)
class ChainSum:
    """One sum of a chain: the slice of each rank's numbers that it takes, the hosts that want the result, and
    the buffers of this rank for the sum on its way and, if its host wants it, for the result."""

    at: slice
    wanted: Sequence[int]
    passing: Tensor
    total: Tensor

    def pieces(self, numbers: Tensor) -> Sequence[Tensor]:
        """Split `numbers`, as many as the sum has, into the pieces that are passed on one by one."""
        return numbers.tensor_split(min(self.passing.nbytes // PIECE + 1, PIECES))


class AcrossHosts(GlooDirect):
    """A `Backend` of one axis over the ranks of an MPI group."""

    _hosts: Sequence[Sequence[int]] = ()
    """The ranks of each host, in one order on all ranks; empty unless there are several hosts with equally
    many ranks each."""
    _in_chunks = True
    """Whether each rank sums one chunk of an all-reduce: between hosts that cannot form a chain."""
    _in_order = False
    """Whether ranks are numbered host by host."""

    def __init__(self, axis: str, size: int, rank: int, group: dist.ProcessGroup) -> None:
        super().__init__(axis, size, rank, group)
        assert isinstance(group, MpiGroup)
        self._mpi: MpiGroup = group

    def find_neighbours(self, gather: Callable[[object], list[Any]], timeout: timedelta) -> None:
        super().find_neighbours(gather, timeout)
        near = sorted({self._rank, *(self._board.ranks if self._board is not None else ())})
        found = gather(near)
        hosts = [list(each) for each in sorted({tuple(each) for each in found})]
        alike = len({len(each) for each in hosts}) == 1 and sum(map(len, hosts)) == self._size
        if alike and 1 < len(hosts) < self._size:
            self._hosts, self._near = hosts, near
            self._in_order = [*itertools.chain(*hosts)] == [*range(self._size)]
            self._host = hosts.index(near)
            self._column = [host[near.index(self._rank)] for host in hosts]  # the ranks of a chain
        self._in_chunks = len(hosts) > 1 and not self._in_order

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        """Return the bytes that a rank sends. They differ along a chain, so there it is their mean."""
        chunked = (self._in_order or self._in_chunks) and nbytes > LITTLE
        return 2 * (self._size - 1) * nbytes // self._size if chunked else super().bytes_of_all_reduce(nbytes)

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        board = self._board
        if not self._hosts or board is None or shard.nbytes < SMALL:
            return super().all_gather(full, shard, of)
        exchange = self._next(f"all-gather{of} over {self._axis} ({shard.numel()} {shard.dtype})", 2)
        what, _, first, sign, tag = exchange
        others = [host for host in self._hosts if host != self._near]
        ready = shard if board.heap.offset(shard) >= 0 else self._stage(shard)
        # shards from other hosts, for all ranks here
        passed = self._place(len(others) * shard.numel(), shard.dtype)
        with reporting(what, self.watched):
            for to in board.ranks:
                board.post(to, first, ready, sign)
            moving = self._to_other_hosts(shard, passed, others, tag)
        relay = self._mpi.operation(what, self._passing(moving, passed, exchange), [shard])
        places = full.chunk(self._size)

        def fill(source: int, shards: Tensor) -> None:
            """Take what rank `source` passed on."""
            column = self._near.index(source)
            for host, sent in zip(others, shards.chunk(len(others)), strict=True):
                put(places[host[column]], sent)

        def complete() -> None:
            put(places[self._rank], shard)
            fill(self._rank, passed)
            for source in board.ranks:
                put(places[source], board.await_post(source, first, shard.numel(), shard.dtype, sign))
                board.acknowledge(source, first)
                fill(source, board.await_post(source, first + 1, passed.numel(), shard.dtype, sign))
                board.acknowledge(source, first + 1)

        staged = [passed] if ready is shard else [passed, ready]
        return self._read_by_others(
            exchange, [relay], complete, {first: [ready], first + 1: [passed]}, staged
        )

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        board, hosts = self._board, len(self._hosts)
        # a chain sends one sum for each rank; direct exchange, for each rank elsewhere, every rank's numbers
        less = hosts * out.itemsize < (hosts - 1) * len(self._near) * full.itemsize if hosts else False
        if not self._in_order or board is None or full.nbytes <= LITTLE or not less:
            return super().reduce_scatter(out, full, accumulate, of)
        exchange = self._next(f"reduce-scatter{of} over {self._axis} ({full.numel()} {full.dtype})", 1)
        size = out.numel()
        passing = torch.empty(hosts * size, dtype=out.dtype).chunk(hosts)
        total = passing[-1] if self._host == hosts - 1 else torch.empty_like(out)
        sums = [
            ChainSum(slice(rank * size, (rank + 1) * size), (host,), passing[host], total)
            for host, rank in enumerate(self._column)
        ]
        ready = full if board.heap.offset(full) >= 0 else self._stage(full)
        chain = self._begin_chain(exchange, ready, sums, None)
        staged = [] if ready is full else [ready]
        finish = lambda: sum_into(out, [total], accumulate)  # noqa: E731
        return self._read_by_others(exchange, [chain], finish, {exchange.notice: [ready]}, staged)

    def all_reduce(self, tensor: Tensor) -> Work:
        board, hosts = self._board, len(self._hosts)
        if self._in_chunks and tensor.nbytes > LITTLE:
            exchange = self._next(f"all-reduce over {self._axis} ({tensor.numel()} {tensor.dtype})", 0)
            what, number = exchange.what, exchange.number
            work = self._mpi.operation(what, self._chunked(tensor, exchange.tag))
            return Work([work], what=what, group=self.watched, number=number)
        if not self._in_order or board is None or tensor.nbytes <= LITTLE:
            return super().all_reduce(tensor)
        exchange = self._next(f"all-reduce over {self._axis} ({tensor.numel()} {tensor.dtype})", 2)
        second, sign = exchange.notice + 1, exchange.sign
        places = dict(zip(self._near, tensor.tensor_split(len(self._near)), strict=True))
        own = places[self._rank]
        start = own.storage_offset() - tensor.storage_offset()
        total = self._place(own.numel(), own.dtype)
        passing = total if self._host == hosts - 1 else torch.empty_like(own)
        chain_sum = ChainSum(slice(start, start + own.numel()), range(hosts), passing, total)
        ready = tensor if board.heap.offset(tensor) >= 0 else self._stage(tensor)
        chain = self._begin_chain(exchange, ready, [chain_sum], total)

        def complete() -> None:
            sums = {
                source: board.await_post(source, second, places[source].numel(), tensor.dtype, sign)
                for source in board.ranks
            }
            # a rank that has its sum has read this rank's numbers, which may now be overwritten
            for source, summed in {**sums, self._rank: total}.items():
                put(places[source], summed)
            for source in sums:
                board.acknowledge(source, second)

        staged = [total] if ready is tensor else [total, ready]
        return self._read_by_others(
            exchange, [chain], complete, {second - 1: [ready], second: [total]}, staged
        )

    def _chunked(self, tensor: Tensor, tag: int) -> Iterator[Step]:
        """Sum in place: each rank sums its chunk, which all ranks send to it, and sends the result to all."""
        chunks, own = tensor.tensor_split(self._size), self._rank
        received = [
            chunk if rank == own else torch.empty_like(chunks[own]) for rank, chunk in enumerate(chunks)
        ]
        yield self._swapped(chunks, received, tag)
        sum_into(chunks[own], received, False)
        yield self._swapped([chunks[own]] * self._size, chunks, tag)

    def _swapped(self, chunks: Sequence[Tensor], places: Sequence[Tensor], tag: int) -> list[Any]:
        """Begin to give every other rank its chunk, and to receive theirs into `places`."""
        moving: list[Any] = []
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            moving.append(self._receiving(places[source], source, tag))
            moving.append(self._sending(chunks[to], to, tag))
        return moving

    def _sending(self, tensor: Tensor, to: int, tag: int) -> Any:
        return self._mpi.sending(tensor, to, tag)

    def _receiving(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._mpi.receiving(tensor, source, tag)

    def _pending_of(self, what: str, begun: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """Return one operation for all messages: small messages spend most of their time in Python."""
        return [self._mpi.operation(what, iter([begun]), tensors)] if begun else []

    def _to_other_hosts(
        self, shard: Tensor, passed: Tensor, others: Sequence[Sequence[int]], tag: int
    ) -> list[Any]:
        """Begin to exchange this rank's shard with one rank of each other host, whose shard goes to
        `passed`."""
        moving: list[Any] = []
        for host, place in zip(others, passed.chunk(len(others)), strict=True):
            there = host[self._near.index(self._rank)]
            moving.append(self._mpi.receiving(place, there, tag))
            moving.append(self._mpi.sending(shard, there, tag))
        return moving

    def _passing(self, moving: Sequence[Any], passed: Tensor, exchange: Exchange) -> Iterator[Step]:
        """Post the shards of other hosts to this host's ranks, once they have arrived."""
        yield moving
        self._tell(exchange, passed)

    def _tell(self, exchange: Exchange, found: Tensor) -> None:
        """Post the second notice of an exchange to this host's ranks."""
        assert self._board is not None
        for to in self._board.ranks:
            self._board.post(to, exchange.notice + 1, found, exchange.sign)

    def _begin_chain(
        self, exchange: Exchange, ready: Tensor, sums: Sequence[ChainSum], found: Tensor | None
    ) -> Operation:
        """Begin the sums, to which this rank gives the numbers in `ready`. The result is written to `found`,
        if given, and posted to this host's ranks."""
        assert self._board is not None
        with reporting(exchange.what, self.watched):
            for to in self._board.ranks:
                self._board.post(to, exchange.notice, ready, exchange.sign)
            return self._mpi.operation(exchange.what, self._chain(exchange, ready, sums, found))

    def _chain(
        self, exchange: Exchange, ready: Tensor, sums: Sequence[ChainSum], found: Tensor | None
    ) -> Iterator[Step]:
        board, group, column, host = self._board, self._mpi, self._column, self._host
        _, _, notice, sign, tag = exchange
        assert board is not None
        last = len(column) - 1
        before = lambda piece: group.receiving(piece, column[host - 1], tag)  # noqa: E731
        coming = deque(
            before(piece) for chain_sum in sums for piece in chain_sum.pieces(chain_sum.passing) if host
        )
        back = [
            group.receiving(piece, column[last], tag)
            for chain_sum in sums
            for piece in chain_sum.pieces(chain_sum.total)
            if host != last and host in chain_sum.wanted
        ]
        yield lambda: all(board.is_posted(source, notice, sign) for source in board.ranks)
        numbers = [
            ready if source == self._rank
            else board.await_post(source, notice, ready.numel(), ready.dtype, sign)
            for source in self._near
        ]  # fmt: skip
        sent = []
        for chain_sum in sums:
            to = [host + 1] if host != last else [each for each in chain_sum.wanted if each != last]
            of_ranks = zip(*(chain_sum.pieces(each[chain_sum.at]) for each in numbers), strict=True)
            for total, added in zip(chain_sum.pieces(chain_sum.passing), of_ranks, strict=True):
                if host:
                    yield [coming.popleft()]
                sum_into(total, [total, *added] if host else added, False)
                sent += [group.sending(total, column[each], tag) for each in to]
        for source in board.ranks:
            board.acknowledge(source, notice)
        yield [*sent, *back]
        if found is not None:
            self._tell(exchange, found)
