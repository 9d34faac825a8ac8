"""Direct exchanges over MPI between hosts that have several ranks each: what all ranks of a host want crosses
the network once.

Invariants: those of `gloo_direct`; numbers are the same to the last bit as if every rank had sent to every
other one. What a rank passes on goes on whoever waits, and for what: operations of MPI run by themselves.

Communication: of an all-gather each rank sends its part to one rank of every other host, which has its own
host read it there: (hosts - 1) parts in place of (ranks of other hosts). A reduce-scatter and an all-reduce
are sent directly: sums inside a host first would have other last bits than sums in rank order."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.gloo_direct import NUMBERS, SIGNS, SMALL, GlooDirect
from polyreme.distributed.mpi import Operation, Step
from polyreme.distributed.sums import put
from polyreme.distributed.work import UNSETTLED, Work, reporting


class AcrossHosts(GlooDirect):
    """A `Backend` of one axis whose ranks are those of a group over MPI."""

    _hosts: Sequence[Sequence[int]] = ()
    """The ranks of each host, where there are several hosts with as many ranks each; in one order on all
    ranks."""

    def meet(self, gather: Callable[[object], list[Any]], timeout: timedelta) -> None:
        super().meet(gather, timeout)
        self._timeout = timeout
        near = sorted({self._rank, *(self._board.ranks if self._board is not None else ())})
        found = gather(near)
        hosts = [list(each) for each in sorted({tuple(each) for each in found})]
        alike = len({len(each) for each in hosts}) == 1 and sum(map(len, hosts)) == self._size
        if alike and 1 < len(hosts) < self._size:
            self._hosts, self._near = hosts, near

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        board = self._board
        if not self._hosts or board is None or shard.nbytes < SMALL:
            return super().all_gather(full, shard, of)
        what = f"all-gather{of} over {self._axis} ({shard.numel()} {shard.dtype})"
        number, first, second, sign = self._begun, self._posted, self._posted + 1, zlib.crc32(what.encode())
        self.meeting.begun.append((number, what))
        self._begun, self._posted = self._begun + 1, self._posted + 2
        others = [host for host in self._hosts if host != self._near]
        near = [rank for rank in self._near if rank != self._rank]
        ready = shard if board.heap.offset(shard) >= 0 else self._stage(shard)
        passed = self._place(len(others) * shard.numel(), shard.dtype)  # what other hosts send to this rank
        with reporting(what, self.meeting):
            for to in near:
                board.post(to, first, ready, sign)
            moving = self._to_other_hosts(shard, passed, others, number % NUMBERS * SIGNS + sign % SIGNS)
        relay = Operation(what, self._passing(moving, near, passed, (second, sign)), self._timeout)
        places = full.chunk(self._size)

        def fill(source: int, parts: Tensor) -> None:
            """Take what rank `source` passed on."""
            column = self._near.index(source)
            for host, part in zip(others, parts.chunk(len(others)), strict=True):
                put(places[host[column]], part)

        def complete() -> None:
            put(places[self._rank], shard)
            fill(self._rank, passed)
            for source in near:
                put(places[source], board.await_post(source, first, shard.numel(), shard.dtype, sign))
                board.acknowledge(source, first)
                fill(source, board.await_post(source, second, passed.numel(), shard.dtype, sign))
                board.acknowledge(source, second)

        def settled(block: bool) -> bool:
            for to in near if block else ():
                board.await_read(to, first)
                board.await_read(to, second)
            return was_read()

        reads = board.reading(first), board.reading(second)
        was_read = lambda: all(each() for each in reads)  # noqa: E731
        work = Work([relay], complete, what, settled, self.meeting, number)
        UNSETTLED.keep_alive(was_read, [board.memory, ready, passed])
        self._unstage(passed, work)
        if ready is not shard:
            self._unstage(ready, work)
        return work

    def _to_other_hosts(
        self, shard: Tensor, passed: Tensor, others: Sequence[Sequence[int]], tag: int
    ) -> list[Any]:
        """Begin to exchange this rank's part with one rank of each other host, whose part goes to
        `passed`."""
        moving: list[Any] = []
        for host, part in zip(others, passed.chunk(len(others)), strict=True):
            there = host[self._near.index(self._rank)]
            moving.append(dist.irecv(part, group=self._group, group_src=there, tag=tag))
            moving.append(dist.isend(shard, group=self._group, group_dst=there, tag=tag))
        return moving

    def _passing(
        self, moving: Sequence[Any], near: Sequence[int], passed: Tensor, notice: tuple[int, int]
    ) -> Iterator[Step]:
        """Tell this host's ranks of what came from others, when it has come."""
        yield lambda: all(each.is_ended for each in moving)
        for each in moving:
            each.wait()  # which raises where it failed
        assert self._board is not None
        for to in near:
            self._board.post(to, notice[0], passed, notice[1])
