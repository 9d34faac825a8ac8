"""Collectives as direct exchanges: every rank of an axis gives every other one its chunk, and sums itself
what it receives.

Invariants: a sum over ranks is taken in rank order for each element by itself, so that it does not depend on
where in a buffer the element lies, and in the output's dtype whatever the dtype on the wire. Every rank
begins the same exchanges in the same order.

Communication: all-gather, reduce-scatter and all-to-all send (n-1)/n of the buffer, half of what gloo's own
reduce-scatter sends. All-reduce, meant for few numbers, sends the tensor n-1 times. Ranks of one host tell
each other only where a chunk or a message lies (`shared_memory`) and read it there; to other hosts it is
sent, and so is every broadcast. Nothing goes through gloo's worker threads: one that still holds a tensor
when the interpreter ends aborts the process."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed.process_group import of_cpus
from polyreme.distributed.shared_memory import Board, heap, open_peer
from polyreme.distributed.sums import put, sum_into
from polyreme.distributed.watch import WatchedGroup
from polyreme.distributed.work import DONE, Message, Work, reporting

STAGED = 4
"""Copies of about one size that are kept for reuse. They stage tensors that other ranks cannot read in
place."""
NUMBERS = SIGNS = 1 << 14
"""How many numbers and signs a message's tag can hold. The tag tells exchanges apart, in whatever order they
are waited for, by their number and by a hash of their description (the sign): where ranks begin different
exchanges, none takes one's data for another's."""
TAGS = NUMBERS * SIGNS
"""The first tag that no exchange uses."""


class Exchange(NamedTuple):
    """One exchange: its description, its number on the axis, the number of its first notice on the board, and
    the sign and the tag by which its notices and messages are told from others'."""

    what: str
    number: int
    notice: int
    sign: int
    tag: int


class GlooDirect:
    """A `Backend` of one axis, named `axis`, over the ranks of a gloo or MPI group.

    Data is sent until `find_neighbours` has found ranks on this host, whose memory is then read."""

    deterministic, device = True, torch.device("cpu")

    def __init__(self, axis: str, size: int, rank: int, group: dist.ProcessGroup) -> None:
        self._axis, self._size, self._rank, self._group = axis, size, rank, group
        # boards of exchanges and of messages, where other ranks are on this host
        self._board: Board | None = None
        self._mail: Board | None = None
        self._staged: dict[int, deque[tuple[Tensor, Work]]] = defaultdict(deque)  # keys: bytes
        self.watched = WatchedGroup(group)
        self._begun = self._posted = 0  # numbers of the next exchange, and of its notice
        self._sent, self._received = Counter[int](), Counter[int]()  # messages through shared memory, by rank

    @property
    def kind(self) -> str:
        """ "shared memory" if this rank reads another one's memory, else the group's backend."""
        return f"{of_cpus(self._group)} direct" if self._board is None else "shared memory"

    def find_neighbours(self, gather: Callable[[object], list[Any]], timeout: timedelta) -> None:
        """Find the ranks of the axis that are on this host, to read their memory. `gather` returns every
        rank's value; all ranks must call."""
        mine, seconds = heap(), timeout.total_seconds()
        boards = [Board(mine, self._axis, self._rank, self._size, seconds) for _ in range(2) if mine]
        addresses = gather(mine and (mine.address, [board.offset for board in boards]))
        peers = {
            rank: open_peer(*address[0])
            for rank, address in enumerate(addresses)
            if address and rank != self._rank
        }
        can_read = gather([rank for rank, found in peers.items() if found])
        for rank, found in peers.items():
            if found and self._rank in can_read[rank]:
                for board, offset in zip(boards, addresses[rank][1], strict=True):
                    board.connect(rank, found, offset)
                self._board, self._mail = boards

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._board is not None and device.type == "cpu":
            return self._board.heap.empty(size, dtype)
        with torch.inference_mode(False):  # the user's inference mode ends before the tensor's use
            return torch.empty(size, dtype=dtype, device=device)

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes

    def abort(self, why: str) -> None:
        """Break off all operations. Other ranks notice it by gloo's connections and the shared memory; those
        that only MPI connects to this rank learn it when they look for it, after `Watch.patience`. MPI itself
        keeps what it has begun, with its tensors."""
        self.watched.abort(f"this process {why}")
        for board in self._boards():
            board.abort(self.watched.broken)

    def close(self) -> None:
        for board in self._boards():
            board.close()
        self._board = self._mail = None
        self._staged.clear()

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        shards = full.chunk(self._size)

        def fill(found: Sequence[Tensor]) -> None:
            for target, received in zip(shards, found, strict=True):
                put(target, received)

        return self._begin([shard] * self._size, shards.__getitem__, fill, f"all-gather{of}")

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        return self._begin(
            full.chunk(self._size),
            lambda _: torch.empty_like(out, dtype=full.dtype),
            lambda received: sum_into(out, received, accumulate),
            f"reduce-scatter{of}",
        )

    def all_reduce(self, tensor: Tensor) -> Work:
        if self._board is None:
            out = [tensor] * self._size
        else:  # others read a copy while the sum overwrites the tensor
            copy = self._stage(tensor)
            out = [tensor if rank == self._rank else copy for rank in range(self._size)]
        work = self._begin(
            out,
            lambda _: torch.empty_like(tensor),
            lambda summands: sum_into(tensor, summands, False),
            "all-reduce",
        )
        if out[self._rank - 1] is not tensor:
            self._unstage(copy, work)
        return work

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        def fill(found: Sequence[Tensor]) -> None:
            for target, chunk in zip(received, found, strict=True):
                put(target, chunk)

        sizes = [each.numel() for each in received]
        return self._begin(sent, received.__getitem__, fill, f"all-to-all{of}", sizes)

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        mine, found = torch.frombuffer(bytearray(data), dtype=torch.uint8), list[bytes]()

        def keep(messages: Sequence[Tensor]) -> None:
            found.extend(received.numpy().tobytes() for received in messages)

        self._begin([mine] * self._size, lambda _: torch.empty_like(mine), keep, "gathering reports").settle()
        return found

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        others = [to for to in range(self._size) if to != source]
        with reporting(what := f"broadcast over {self._axis}"):
            if self._rank == source:
                pending = [self._to(tensor, to) for to in others]
            else:
                pending = [self._from(tensor, source)]
        return Work(pending, what=what, group=self.watched)

    def send(self, tensor: Tensor, to: int) -> Work:
        what, mail = f"send over {self._axis}", self._mail
        if mail is None or to not in mail.ranks:
            with reporting(what):
                return Work([self._to(tensor, to, TAGS)], what=what, group=self.watched)
        number = self._sent[to]
        self._sent[to] += 1
        ready = tensor if mail.heap.offset(tensor) >= 0 else self._stage(tensor.view(-1))
        with reporting(what, self.watched):
            mail.post(to, number, ready)
        was_read = mail.reading(number, [to])

        def settled(block: bool) -> bool:
            if block:
                mail.await_read(to, number)
            return was_read()

        work = Work((), None, what, settled, self.watched)
        mail.heap.unsettled.keep_alive(was_read, [mail.memory, ready])
        if ready is tensor:
            return work
        self._unstage(ready, work)
        return DONE

    def receive(self, tensor: Tensor, source: int) -> Work:
        what, mail = f"receive over {self._axis}", self._mail
        if mail is None or source not in mail.ranks:
            with reporting(what):
                return Work([self._from(tensor, source, TAGS)], what=what, group=self.watched)
        number = self._received[source]
        self._received[source] += 1

        def complete() -> None:
            put(tensor.view(-1), mail.await_post(source, number, tensor.numel(), tensor.dtype))
            mail.acknowledge(source, number)

        return Work((), complete, what, group=self.watched)

    def _boards(self) -> Sequence[Board]:
        return [board for board in (self._board, self._mail) if board is not None]

    def _begin(
        self,
        out: Sequence[Tensor],
        into: Callable[[int], Tensor],
        finish: Callable[[Sequence[Tensor]], None],
        what: str,
        sizes: Sequence[int] | None = None,
    ) -> Work:
        """Begin to give out[r] to every rank r of the axis and to receive their chunks, of sizes[r] elements
        each, or all of one size. `finish` is called with the chunks in rank order, this rank's own among
        them.

        A rank on this host is told where out[r] lies, and acknowledges that it has read it. Other hosts'
        chunks are received in into(r)."""
        dtype, board = out[0].dtype, self._board
        what = f"{what} over {self._axis} ({'' if sizes else f'{out[0].numel()} '}{dtype})"
        sizes = sizes or [each.numel() for each in out]
        near = board.ranks if board is not None else ()
        exchange = self._next(what, int(board is not None))
        _, number, notice, sign, tag = exchange
        chunks, ready = list(out), {id(out[rank]): out[rank] for rank in near}
        for key, each in ready.items():
            if board is not None and each.numel() and board.heap.offset(each) < 0:
                ready[key] = self._stage(each)
        pending: list[Any] = []
        with reporting(what, self.watched):
            # each rank starts with a different peer, so that none gets all first messages
            for step in range(1, self._size):
                to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                if source not in near:
                    chunks[source] = into(source)
                    if sizes[source]:
                        pending.append(self._receiving(chunks[source], source, tag))
                if board is not None and to in near:
                    board.post(to, notice, ready[id(out[to])], sign)
                elif out[to].numel():
                    pending.append(self._sending(out[to], to, tag))
            pending = self._pending_of(what, pending, [*out, *chunks])
        if board is None:
            return Work(pending, lambda: finish(chunks), what, group=self.watched, number=number)

        def complete() -> None:
            for source in near:
                chunks[source] = board.await_post(source, notice, sizes[source], dtype, sign)
            finish(chunks)
            for source in near:
                board.acknowledge(source, notice)

        staged = [each for key, each in ready.items() if key != id(each)]
        return self._read_by_others(exchange, pending, complete, {notice: [*ready.values()]}, staged)

    def _read_by_others(
        self,
        exchange: Exchange,
        pending: Sequence[Any],
        complete: Callable[[], None],
        posted: Mapping[int, Sequence[Tensor]],
        staged: Sequence[Tensor],
    ) -> Work:
        """Return the work of an exchange whose tensors are `posted` for the ranks of this host, by the
        numbers of their notices. Copies in `staged` are reused once all have read them."""
        board = self._board
        assert board is not None

        def settled(block: bool) -> bool:
            for to in board.ranks if block else ():
                for notice in posted:
                    board.await_read(to, notice)
            return was_read()

        reads = [board.reading(notice) for notice in posted]
        was_read = lambda: all(each() for each in reads)  # noqa: E731
        work = Work(pending, complete, exchange.what, settled, self.watched, exchange.number)
        board.heap.unsettled.keep_alive(was_read, [board.memory, *chain(*posted.values())])
        for each in staged:
            self._unstage(each, work)
        return work

    def _to(self, tensor: Tensor, to: int, tag: int = 0) -> Message:
        return Message(to, lambda: dist.isend(tensor, group=self._group, group_dst=to, tag=tag))

    def _from(self, tensor: Tensor, source: int, tag: int = 0) -> Message:
        return Message(source, lambda: dist.irecv(tensor, group=self._group, group_src=source, tag=tag))

    def _sending(self, tensor: Tensor, to: int, tag: int) -> Any:
        return self._to(tensor, to, tag)

    def _receiving(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._from(tensor, source, tag)

    def _pending_of(self, what: str, begun: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """Return the works to wait for, given messages of these tensors that were begun."""
        return begun

    def _next(self, what: str, notices: int) -> Exchange:
        number, notice, sign = self._begun, self._posted, zlib.crc32(what.encode())
        self.watched.begun.append((number, what, self.watched.watch.call))
        self._begun, self._posted = self._begun + 1, self._posted + notices
        return Exchange(what, number, notice, sign, number % NUMBERS * SIGNS + sign % SIGNS)

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` that ranks of this host can read."""
        place = self._place(tensor.numel(), tensor.dtype)
        # a subclass' records of the tensor do not apply to its copy
        with torch._C.DisableTorchFunctionSubclass():
            return place.copy_(tensor)

    def _place(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor that ranks of this host can read, to be given back by `_unstage`."""
        nbytes = size * dtype.itemsize
        copies = self._staged[_about(nbytes)]
        reusable = bool(copies) and copies[0][1].is_settled()
        whole = copies.popleft()[0] if reusable else self.empty(_about(nbytes), torch.uint8, self.device)
        return whole[:nbytes].view(dtype)

    def _unstage(self, copy: Tensor, last: Work) -> None:
        """Keep `copy` for another tensor of about its size, which may take it once `last` is settled."""
        copies = self._staged[_about(copy.nbytes)]
        if len(copies) < STAGED:
            copies.append((copy.view(torch.uint8).as_strided([_about(copy.nbytes)], [1]), last))


def _about(nbytes: int) -> int:
    """Return the next power of two, so that copies of similar sizes can be reused for each other."""
    return 1 << (nbytes - 1).bit_length()
