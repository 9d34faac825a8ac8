"""Collectives as direct exchanges: every rank of an axis gives every other one its part, and sums what it
gets itself.

Invariants: a sum over ranks is taken in rank order for each element by itself, so that it does not depend on
where in a buffer the element lies, and in the output's dtype whatever the dtype on the wire. Every rank
begins the same exchanges in the same order.

Communication: all-gather and reduce-scatter send (n-1)/n of the buffer, half of what gloo's own
reduce-scatter sends; all-reduce, which is for little, n-1 times the tensor. Ranks of one host only tell each
other where a part lies (`shared_memory`) and read it there; to others, and where it is little, it is sent.
Nothing goes through gloo's worker threads: one that still holds a tensor when the interpreter ends aborts the
process."""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.shared_memory import Board, heap, peer
from polyreme.distributed.watch import Meeting
from polyreme.distributed.work import UNSETTLED, Work, reporting

CHUNK = 1 << 18
"""Elements summed at a time: small enough that a chunk and its conversion stay in the cache."""
SMALL = 4096
"""Bytes below which numbers are sent even to a rank of the same host: telling it where they lie takes as many
messages."""
STAGED = 4
"""Copies of one size, of tensors that others cannot read where they are, which are kept to be used again."""
NUMBERS = SIGNS = 1 << 14
"""A message's tag tells the exchanges from each other, whatever the order in which they are waited for, by
their number and by what each is about: where ranks do not begin the same ones, none takes one's numbers for
another's."""
TAGS = NUMBERS * SIGNS
"""Beyond those of exchanges."""


class DirectExchange:
    """The exchanges of one axis, named `axis`, whose ranks are those of the gloo group. Tensors are flat and
    contiguous.

    Sent and not read, until `meet` has found ranks on this host."""

    def __init__(self, axis: str, size: int, rank: int, group: dist.ProcessGroup) -> None:
        self._axis, self._size, self._rank, self._group = axis, size, rank, group
        self._board: Board | None = None  # shared with the ranks of this host, if there are others
        self._staged: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Work]]] = defaultdict(deque)
        self.meeting = Meeting(group)
        self._begun = self._posted = 0  # exchanges, and those of them on the board

    @property
    def reads(self) -> bool:
        """Whether there is a rank whose memory this one reads."""
        return self._board is not None

    def meet(self, gather: Callable[[object], list[Any]], timeout: timedelta) -> None:
        """Find the ranks of the axis that are on this host. `gather` returns every rank's value; all ranks
        must call."""
        mine = heap()
        board = (
            None if mine is None else Board(mine, self._axis, self._rank, self._size, timeout.total_seconds())
        )
        addresses = gather(None if mine is None or board is None else (mine.address, board.offset))
        peers = {
            rank: peer(*address[0])
            for rank, address in enumerate(addresses)
            if address and rank != self._rank
        }
        can_read = gather([rank for rank, found in peers.items() if found])
        for rank, found in peers.items():
            if found and self._rank in can_read[rank] and board is not None:
                board.meet(rank, found, addresses[rank][1])
                self._board = board

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, not initialised, that ranks of this host can read where it is."""
        if self._board is not None:
            return self._board.heap.empty(size, dtype)
        with torch.inference_mode(False):  # the user's may be on, and the tensor is written to after it
            return torch.empty(size, dtype=dtype)

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        """As `Axis.all_gather`."""
        places = full.chunk(self._size)

        def fill(parts: Sequence[Tensor]) -> None:
            for place, part in zip(places, parts, strict=True):
                put(place, part)

        return self._begin([shard] * self._size, places.__getitem__, fill, f"all-gather{of}")

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        """As `Axis.reduce_scatter`."""
        return self._begin(
            full.chunk(self._size),
            lambda _: torch.empty_like(out, dtype=full.dtype),
            lambda received: sum_into(out, received, accumulate),
            f"reduce-scatter{of}",
        )

    def all_reduce(self, tensor: Tensor) -> Work:
        """As `Axis.all_reduce`."""
        if self._board is None or tensor.nbytes < SMALL:
            out = [tensor] * self._size
        else:  # others read a copy while the sum takes its place
            copy = self._stage(tensor)
            out = [tensor if rank == self._rank else copy for rank in range(self._size)]
        work = self._begin(
            out,
            lambda _: torch.empty_like(tensor),
            lambda parts: sum_into(tensor, parts, False),
            "all-reduce",
        )
        if out[self._rank - 1] is not tensor:
            self._unstage(copy, work)
        return work

    def gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Every rank's `tensor`, of the same size everywhere."""
        found: list[Tensor] = []
        out = [tensor] * self._size
        self._begin(
            out,
            lambda _: torch.empty_like(tensor),
            lambda parts: found.extend(part.clone() for part in parts),
            what,
        ).settle()
        return found

    def _begin(
        self,
        out: Sequence[Tensor],
        into: Callable[[int], Tensor],
        finish: Callable[[Sequence[Tensor]], None],
        what: str,
    ) -> Work:
        """Begin to give out[r] to every rank r of the axis and to get theirs, all of one size; `finish` is
        called with what came, in rank order (out[own rank] among it).

        A peer on this host gets told where out[r] lies, and says when it has read it. Others, and all where
        it is little, get the numbers, received in into(r)."""
        what = f"{what} over {self._axis} ({out[0].numel()} {out[0].dtype})"
        board = None if out[0].nbytes < SMALL else self._board
        near = board.ranks if board is not None else ()
        number, notice, sign = self._begun, self._posted, zlib.crc32(what.encode())
        tag = number % NUMBERS * SIGNS + sign % SIGNS
        self.meeting.begun.append((number, what))
        self._begun += 1
        self._posted += board is not None
        parts, ready = list(out), {id(out[rank]): out[rank] for rank in near}
        for key, each in ready.items():
            if board is not None and board.heap.offset(each) < 0:
                ready[key] = self._stage(each)
        pending = []
        with reporting(what, self.meeting):
            # each rank starts with another peer, so that none is everybody's first
            for step in range(1, self._size):
                to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                if source not in near:
                    parts[source] = into(source)
                    pending.append(dist.irecv(parts[source], group=self._group, group_src=source, tag=tag))
                if board is not None and to in near:
                    board.post(to, notice, ready[id(out[to])], sign)
                else:
                    pending.append(dist.isend(out[to], group=self._group, group_dst=to, tag=tag))
        if board is None:
            return Work(pending, lambda: finish(parts), what, meeting=self.meeting, number=number)

        def complete() -> None:
            for source in near:
                parts[source] = board.await_post(source, notice, out[source].numel(), out[source].dtype, sign)
            finish(parts)
            for source in near:
                board.acknowledge(source, notice)

        def settled(block: bool) -> bool:
            for to in near if block else ():
                board.await_read(to, notice)
            return was_read()

        was_read = board.reading(notice)
        work = Work(pending, complete, what, settled, self.meeting, number)
        UNSETTLED.hold(was_read, [board.memory, *ready.values()])
        for key, each in ready.items():
            if key != id(each):
                self._unstage(each, work)
        return work

    def _stage(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` that ranks of this host can read."""
        copies = self._staged[tensor.numel(), tensor.dtype]
        reusable = bool(copies) and copies[0][1].is_settled()
        copy = copies.popleft()[0] if reusable else self.empty(tensor.numel(), tensor.dtype)
        return copy.copy_(tensor)

    def _unstage(self, copy: Tensor, last: Work) -> None:
        """Keep `copy` for another tensor of its size, to which it can be given once `last` is settled."""
        copies = self._staged[copy.numel(), copy.dtype]
        if len(copies) < STAGED:
            copies.append((copy, last))


def put(place: Tensor, part: Tensor) -> None:
    """Copy `part` to its place, unless it is there."""
    if place.data_ptr() != part.data_ptr():
        place.copy_(part)


def sum_into(out: Tensor, parts: Sequence[Tensor], accumulate: bool) -> None:
    """out = (out +) parts[0] + parts[1] + ..., in that order, element by element, in `out`'s dtype. Parts may
    alias `out`."""
    if len(parts) == 1 and not accumulate:
        put(out, parts[0])
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
        # converted first: a mixed-dtype add is several times slower than a copy and an add
        for part in parts[1:]:
            acc.add_(part[start:stop] if part.dtype == out.dtype else operand.copy_(part[start:stop]))
        if accumulate:
            out[start:stop].add_(acc)
        else:
            out[start:stop].copy_(acc)
