"""Direct exchanges over MPI between hosts that have several ranks each: what all ranks of a host want crosses
the network once, and what they add to a sum goes on as one number where that is less.

Invariants: those of `gloo_direct`; numbers are the same to the last bit as if every rank had sent to every
other one, so that a host only ever adds to the sum of all hosts before it. What a rank passes on goes on
whoever waits, and for what: operations of MPI run by themselves.

Communication: of an all-gather each rank sends its part to one rank of every other host, which has its own
host read it there: (hosts - 1) parts in place of (ranks of other hosts). Of a sum, ranks in the same place of
each host are a chain: the first host's sum its ranks' numbers, the next one's add theirs, and the last one's
send what is wanted elsewhere back. Where there is no chain, each rank sums a part of an all-reduce, and sends
it to all. Over gloo nothing would pass a sum on while its rank waits for something else: there all is sent
directly."""

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
"""Bytes of a part below which each rank sends its own to every rank of other hosts: that is one trip, and
passing it on within a host another."""
LITTLE = 1 << 15
"""Bytes up to which each rank sums for itself: that is one trip, and a chain at least two."""
PIECE, PIECES = 1 << 20, 16
"""Bytes of a sum that are passed on by themselves, so that hosts work at the same time; and their most."""


@dataclass(frozen=True)
class ChainSum:
    """One sum of a chain: where among each rank's numbers it is taken, which hosts want it, and where this
    rank has it on its way and, if its host wants it, in the end."""

    at: slice
    wanted: Sequence[int]
    passing: Tensor
    total: Tensor

    def pieces(self, numbers: Tensor) -> Sequence[Tensor]:
        """Those of as many numbers as the sum has."""
        return numbers.tensor_split(min(self.passing.nbytes // PIECE + 1, PIECES))


class AcrossHosts(GlooDirect):
    """A `Backend` of one axis whose ranks are those of a group over MPI."""

    _hosts: Sequence[Sequence[int]] = ()
    """The ranks of each host, where there are several hosts with as many ranks each; in one order on all
    ranks."""
    _in_parts = True
    """Whether an all-reduce is one of parts, each of which one rank sums: between hosts without a chain."""
    _in_order = False
    """Whether each host's ranks follow on those of the one before."""

    def __init__(self, axis: str, size: int, rank: int, group: dist.ProcessGroup) -> None:
        super().__init__(axis, size, rank, group)
        assert isinstance(group, MpiGroup)
        self._mpi: MpiGroup = group

    def meet(self, gather: Callable[[object], list[Any]], timeout: timedelta) -> None:
        super().meet(gather, timeout)
        near = sorted({self._rank, *(self._board.ranks if self._board is not None else ())})
        found = gather(near)
        hosts = [list(each) for each in sorted({tuple(each) for each in found})]
        alike = len({len(each) for each in hosts}) == 1 and sum(map(len, hosts)) == self._size
        if alike and 1 < len(hosts) < self._size:
            self._hosts, self._near = hosts, near
            self._in_order = [*itertools.chain(*hosts)] == [*range(self._size)]
            self._host = hosts.index(near)
            self._column = [host[near.index(self._rank)] for host in hosts]  # the ranks of a chain
        self._in_parts = len(hosts) > 1 and not self._in_order

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        """That of a chain differs from rank to rank: of them all, their mean."""
        parted = (self._in_order or self._in_parts) and nbytes > LITTLE
        return 2 * (self._size - 1) * nbytes // self._size if parted else super().bytes_of_all_reduce(nbytes)

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        board = self._board
        if not self._hosts or board is None or shard.nbytes < SMALL:
            return super().all_gather(full, shard, of)
        exchange = self._next(f"all-gather{of} over {self._axis} ({shard.numel()} {shard.dtype})", 2)
        what, _, first, sign, tag = exchange
        others = [host for host in self._hosts if host != self._near]
        ready = shard if board.heap.offset(shard) >= 0 else self._stage(shard)
        passed = self._place(len(others) * shard.numel(), shard.dtype)  # what other hosts send to this rank
        with reporting(what, self.meeting):
            for to in board.ranks:
                board.post(to, first, ready, sign)
            moving = self._to_other_hosts(shard, passed, others, tag)
        relay = self._mpi.operation(what, self._passing(moving, passed, exchange), [shard])
        places = full.chunk(self._size)

        def fill(source: int, parts: Tensor) -> None:
            """Take what rank `source` passed on."""
            column = self._near.index(source)
            for host, part in zip(others, parts.chunk(len(others)), strict=True):
                put(places[host[column]], part)

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
        # a host sends on a sum for every rank; else, for every rank of another one, its own ranks' numbers
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
        if self._in_parts and tensor.nbytes > LITTLE:
            exchange = self._next(f"all-reduce over {self._axis} ({tensor.numel()} {tensor.dtype})", 0)
            what, number = exchange.what, exchange.number
            work = self._mpi.operation(what, self._parted(tensor, exchange.tag))
            return Work([work], what=what, meeting=self.meeting, number=number)
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
            # who has its sum has read this rank's numbers: they may be written over
            for source, part in {**sums, self._rank: total}.items():
                put(places[source], part)
            for source in sums:
                board.acknowledge(source, second)

        staged = [total] if ready is tensor else [total, ready]
        return self._read_by_others(
            exchange, [chain], complete, {second - 1: [ready], second: [total]}, staged
        )

    def _parted(self, tensor: Tensor, tag: int) -> Iterator[Step]:
        """Sum in place: each rank its part of what all send it, which it then sends to all."""
        parts, own = tensor.tensor_split(self._size), self._rank
        received = [part if rank == own else torch.empty_like(parts[own]) for rank, part in enumerate(parts)]
        yield self._swapped(parts, received, tag)
        sum_into(parts[own], received, False)
        yield self._swapped([parts[own]] * self._size, parts, tag)

    def _swapped(self, parts: Sequence[Tensor], places: Sequence[Tensor], tag: int) -> list[Any]:
        """Begin to give every other rank its part, and to get theirs into places."""
        moving: list[Any] = []
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            moving.append(self._receiving(places[source], source, tag))
            moving.append(self._sending(parts[to], to, tag))
        return moving

    def _sending(self, tensor: Tensor, to: int, tag: int) -> Any:
        return self._mpi.sending(tensor, to, tag)

    def _receiving(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._mpi.receiving(tensor, source, tag)

    def _pending_of(self, what: str, begun: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """One operation: its time is Python's, by far, where messages are small."""
        return [self._mpi.operation(what, iter([begun]), tensors)] if begun else []

    def _to_other_hosts(
        self, shard: Tensor, passed: Tensor, others: Sequence[Sequence[int]], tag: int
    ) -> list[Any]:
        """Begin to exchange this rank's part with one rank of each other host, whose part goes to
        `passed`."""
        moving: list[Any] = []
        for host, part in zip(others, passed.chunk(len(others)), strict=True):
            there = host[self._near.index(self._rank)]
            moving.append(self._mpi.receiving(part, there, tag))
            moving.append(self._mpi.sending(shard, there, tag))
        return moving

    def _passing(self, moving: Sequence[Any], passed: Tensor, exchange: Exchange) -> Iterator[Step]:
        """Tell this host's ranks of what came from others, when it has come."""
        yield moving
        self._tell(exchange, passed)

    def _tell(self, exchange: Exchange, found: Tensor) -> None:
        """Post a second notice."""
        assert self._board is not None
        for to in self._board.ranks:
            self._board.post(to, exchange.notice + 1, found, exchange.sign)

    def _begin_chain(
        self, exchange: Exchange, ready: Tensor, sums: Sequence[ChainSum], found: Tensor | None
    ) -> Operation:
        """Begin to sum numbers of which this rank's are `ready`, for this host's ranks, too; what is `found`
        they are told of."""
        assert self._board is not None
        with reporting(exchange.what, self.meeting):
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
            parts = zip(*(chain_sum.pieces(each[chain_sum.at]) for each in numbers), strict=True)
            for total, added in zip(chain_sum.pieces(chain_sum.passing), parts, strict=True):
                if host:
                    yield [coming.popleft()]
                sum_into(total, [total, *added] if host else added, False)
                sent += [group.sending(total, column[each], tag) for each in to]
        for source in board.ranks:
            board.acknowledge(source, notice)
        yield [*sent, *back]
        if found is not None:
            self._tell(exchange, found)
