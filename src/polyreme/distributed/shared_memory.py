"""Memory that the ranks of one host read where it lies: between them data is copied once, and not twice
through a socket.

Invariants: a process writes only to its own memory and reads that of others; it reads a buffer only between
its owner's notice and its own acknowledgement, both on a `Board`; buffers that others may still read are kept
until they have, even where nobody waits for the operation. The memory has no name in any file system, so that
nothing is left of it when the processes end, however they end.

A notice is one aligned word written after the data it is about. Other cores see both in that order on x86; on
other processors nothing is shared."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import platform
import resource
import secrets
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyreme.distributed.watch import NO_ENGINE, MessageError, Watch
from polyreme.distributed.world import CLOSED, Resource, current
from polyreme.errors import TransportError
from polyreme.layout.intervals import round_down, round_up

TOKEN = 16
"""Bytes at the beginning of a heap that identify it among all heaps of all hosts."""
SEGMENT = 1 << 28
"""Bytes mapped at a time. Mapped memory that is not used takes no room; each mapping takes a file
descriptor."""

RING = 256
"""Exchanges that can be under way at a time on one axis."""
OFFSET_BITS = 44
"""Bits of a word that hold the buffer's offset (plus 1, so that no word is 0). The bits above hold the number
of the exchange, modulo NUMBERS."""
NUMBERS = 1 << 19
PATIENCE = 200e-6
"""Seconds of waiting after which the wait sleeps."""
ENOUGH = 64
"""Kept inputs beyond which all of them are checked, not only the oldest."""
LIMITS = {
    errno.EFBIG: ("f", resource.RLIMIT_FSIZE),
    errno.ENOMEM: ("v", resource.RLIMIT_AS),
    errno.EMFILE: ("n", resource.RLIMIT_NOFILE),
}
"""The option of `ulimit` and the number of the process limit that an error means."""


class Unsettled:
    """Keeps the inputs of operations that others of this host may still have to read, even if nobody holds
    the operations any more."""

    def __init__(self) -> None:
        self._alive: deque[tuple[Callable[[], bool], Sequence[object]]] = deque()
        self._enough = ENOUGH

    def keep_alive(self, was_read: Callable[[], bool], what: Sequence[object]) -> None:
        """Keep `what` until `was_read()`: inputs, and the board that says that they are ready."""
        while self._alive and self._alive[0][0]():
            self._alive.popleft()
        self._alive.append((was_read, what))
        if len(self._alive) > self._enough:  # a peer that failed never reads the oldest
            self.sweep()
            self._enough = 2 * len(self._alive) + ENOUGH

    def sweep(self) -> None:
        """Drop all inputs that were read."""
        self._alive = deque(each for each in self._alive if not each[0]())


class Heap:
    """This process' memory for tensors that others read: a nameless file (memfd) that grows by segments as
    tensors are made.

    Freed memory goes back to the system, and its range of the file is reused by the next tensor of its
    size."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._token = secrets.token_bytes(TOKEN)
        self.unsettled = Unsettled()
        with _limits("the file of this process"):
            self._file = os.memfd_create("polyreme")
            os.write(self._file, self._token)
        self._segment: mmap.mmap | None = None  # the last one, from which ranges are cut
        # where in the file it begins; bytes given out; end of the file
        self._base, self._used, self._end = (0, 0, SEGMENT)
        self._free: dict[int, list[tuple[mmap.mmap, int, int]]] = defaultdict(list)  # keys: sizes
        self._offsets: dict[int, int] = {}  # offset in the file of each range in use, by its address

    @property
    def address(self) -> tuple[int, int, str]:
        """The process, file descriptor and token by which another process opens this heap."""
        return self.pid, self._file, self._token.hex()

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros."""
        if not size:
            return torch.empty(0, dtype=dtype)
        memory, offset = self.reserve(size * dtype.itemsize)
        with torch.inference_mode(False):  # the user's inference mode ends before the tensor's use
            tensor = torch.frombuffer(memory, dtype=dtype, count=size)
        self._offsets[tensor.data_ptr()] = offset
        weakref.finalize(memory, self._offsets.pop, tensor.data_ptr(), None).atexit = False
        return tensor

    def reserve(self, nbytes: int, again: bool = True) -> tuple[memoryview, int]:
        """Return a range of zeros, and where it begins in the file. The range is freed when nobody holds it
        any more, and may be reused; without `again` it stays zeros for ever."""
        nbytes = round_up(nbytes, mmap.PAGESIZE)
        segment, base, start = self._free[nbytes].pop() if again and self._free[nbytes] else self._cut(nbytes)
        memory = memoryview(segment)[start : start + nbytes]
        weakref.finalize(memory, self._give_back, nbytes, (segment, base, start), again).atexit = False
        return memory, base + start

    def offset(self, tensor: Tensor) -> int:
        """Return where in the heap `tensor` begins; -1 if it is not in the heap."""
        start = tensor.untyped_storage().data_ptr()
        found = self._offsets.get(start, -1)
        return found if found < 0 else found + tensor.data_ptr() - start

    def _cut(self, nbytes: int) -> tuple[mmap.mmap, int, int]:
        """Return a range that was never used: its segment, where that begins in the file, and where the range
        begins in the segment."""
        _refuse_closed(self._file)
        if self._segment is None or self._used + nbytes > len(self._segment):
            length = round_up(nbytes, SEGMENT)
            with _limits(f"{length:,} bytes"):
                os.ftruncate(self._file, self._end + length)
                self._segment = mmap.mmap(self._file, length, offset=self._end)
            self._base, self._used, self._end = self._end, 0, self._end + length
        self._used += nbytes
        return self._segment, self._base, self._used - nbytes

    def _give_back(self, nbytes: int, where: tuple[mmap.mmap, int, int], again: bool) -> None:
        segment, _, start = where
        # after close others may still read it; and a forked child must not free its parent's memory
        if self._file < 0 or self.pid != os.getpid():
            return
        segment.madvise(mmap.MADV_REMOVE, start, nbytes)
        if again:
            self._free[nbytes].append(where)

    def close(self) -> None:
        """Reserve nothing any more. Ranges in use, and those that other processes have open, stay as they
        are."""
        os.close(self._file)
        self._file, self._segment = -1, None
        self._free.clear()
        self.unsettled = Unsettled()


class PeerHeap:
    """The heap of another process of this host, to be read."""

    def __init__(self, pid: int, file: int, opened: int) -> None:
        self._pid, self._link = pid, Path(f"/proc/{pid}/fd/{file}")
        self._file = opened
        self._segments: dict[tuple[int, int], mmap.mmap] = {}  # keys: begin and end in the file

    @classmethod
    def open(cls, pid: int, file: int, token: str) -> PeerHeap | None:
        """Open the heap at a `Heap.address`; None where it cannot be reached, as from another host or another
        user."""
        try:  # on another host the path may be anything, even a pipe that would block
            opened = os.open(
                f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            )
        except OSError:
            return None
        try:
            same = os.pread(opened, TOKEN, 0).hex() == token
        except OSError:
            same = False
        if not same:
            os.close(opened)
        return cls(pid, file, opened) if same else None

    def alive(self) -> bool:
        """Return whether the process still runs (one that ended and was not reaped yet has no files)."""
        return os.path.lexists(self._link)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return the `nbytes` at `offset` in place, so that what their owner writes there shows."""
        begin, end = round_down(offset, SEGMENT), round_up(offset + nbytes, SEGMENT)
        _refuse_closed(self._file)
        if (begin, end) not in self._segments:
            with _limits(f"{end - begin:,} bytes of process {self._pid}"):
                self._segments[begin, end] = mmap.mmap(
                    self._file, end - begin, prot=mmap.PROT_READ, offset=begin
                )
        return memoryview(self._segments[begin, end])[offset - begin : offset - begin + nbytes]

    def close(self) -> None:
        """Close the heap; memory that was read stays mapped while it is in use."""
        os.close(self._file)
        self._file = -1
        self._segments.clear()


class Board:
    """Notices of one rank of an axis to the others on its host: about exchanges, which have the same numbers
    on all of them, or about messages, which are numbered for each pair of ranks.

    Words `[0, to, exchange % RING]` say that a buffer for rank `to` is ready, and where; words
    `[1, of, exchange % RING]` that rank `of`'s buffer has been read; words `[2, to, exchange % RING]` are the
    signs of the exchanges: ranks with different signs do not exchange; words `[3, to, exchange % RING]` are
    the buffers' bytes. A last word is 1 until the board is closed, and tells others not to wait for it any
    more. `memory` holds the words and outlives the board; its place in the heap, `offset`, is never
    reused."""

    def __init__(self, heap: Heap, axis: str, rank: int, size: int, timeout: float) -> None:
        self.heap, self._axis, self._rank, self._timeout = heap, axis, rank, timeout
        self._watch = current().of(Watch)
        self._shape = (4, size, RING)
        self._size = math.prod(self._shape)
        self.memory, self.offset = heap.reserve(8 * (self._size + 1), again=False)
        words = np.ndarray(self._size + 1, np.int64, self.memory)
        words[-1] = 1
        self._broken = ""  # why this rank waits for nothing any more
        self.close = weakref.finalize(self, _take_down, words, heap.pid)
        """Mark the board as closed, so that others stop waiting for it."""
        self.close.atexit = False
        self._mine = words[:-1].reshape(self._shape)
        self._others: dict[int, tuple[PeerHeap, np.ndarray, np.ndarray]] = {}
        """The heap, the words and the last word of each rank."""

    @property
    def ranks(self) -> Collection[int]:
        """The ranks whose notices this board reads."""
        return self._others.keys()

    def connect(self, rank: int, other: PeerHeap, offset: int) -> None:
        """Read the notices of `rank`, whose board lies at `offset` of its heap."""
        words = np.ndarray(self._size + 1, np.int64, other.read(offset, 8 * (self._size + 1)))
        self._others[rank] = other, words[:-1].reshape(self._shape), words[-1:]

    def abort(self, why: str) -> None:
        """Make all waits on this board fail with `why`, in whichever thread, and those of others for this
        rank."""
        self._broken = why
        self.close()

    def post(self, to: int, exchange: int, buffer: Tensor, sign: int = 0) -> None:
        """Announce that `buffer`, which is in the heap or empty, is ready for rank `to`."""
        if exchange >= RING:
            self.await_read(to, exchange - RING)
        self._mine[2, to, exchange % RING] = sign
        self._mine[3, to, exchange % RING] = buffer.nbytes
        self._mine[0, to, exchange % RING] = _word(
            exchange, self.heap.offset(buffer) if buffer.numel() else 0
        )

    def await_post(self, source: int, exchange: int, size: int, dtype: torch.dtype, sign: int = 0) -> Tensor:
        """Wait until the buffer of rank `source` is ready, and return it in place. Raises TransportError
        where it has another size."""
        offset = (self._await(source, 0, exchange, sign) & ((1 << OFFSET_BITS) - 1)) - 1
        nbytes = int(self._others[source][1][3, self._rank, exchange % RING])
        if nbytes != size * dtype.itemsize:
            raise TransportError(
                f"rank {source} of axis {self._axis} gives {nbytes:,} bytes and not {size * dtype.itemsize:,}"
            )
        if not size:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")
            return torch.frombuffer(self._others[source][0].read(offset, size * dtype.itemsize), dtype=dtype)

    def is_posted(self, source: int, exchange: int, sign: int) -> bool:
        """Return whether the buffer of rank `source` is ready. Raises TransportError where it never will
        be."""
        other, words, there = self._others[source]
        here, alive = there[0], other.alive()  # checked before the word, which may be the last that it wrote
        if _is_about(int(words[0, self._rank, exchange % RING]), exchange):
            return bool(words[2, self._rank, exchange % RING] == sign)
        self._refuse_broken()
        if not here or not alive:
            raise TransportError(f"rank {source} of axis {self._axis} {'ended' if here else NO_ENGINE}")
        return False

    def acknowledge(self, source: int, exchange: int) -> None:
        """Announce that the buffer of rank `source` has been read."""
        self._mine[1, source, exchange % RING] = _word(exchange, 0)

    def await_read(self, to: int, exchange: int) -> None:
        """Wait until rank `to` has read its buffer."""
        self._await(to, 1, exchange)

    def reading(self, exchange: int, ranks: Collection[int] | None = None) -> Callable[[], bool]:
        """Return a function that tells whether all these ranks, by default all on the board, have read their
        buffers or never will."""
        waiting_for = [
            (words[1, self._rank, exchange % RING :][:1], there)
            for _, words, there in (self._others[rank] for rank in ranks or self._others)
        ]
        return lambda: all(_is_about(int(word[0]), exchange) or not there[0] for word, there in waiting_for)

    def _await(self, rank: int, kind: int, exchange: int, sign: int | None = None) -> int:
        """Wait until the word of `rank`'s board is about this exchange, or a later one, with this `sign`, and
        return it."""
        other, words, there = self._others[rank]
        began = checked = time.monotonic()
        while True:
            alive, here = True, there[0]
            if (now := time.monotonic()) - checked > 0.05:
                # checked before the word, which may be the last that it wrote
                alive, checked = (other.alive(), now)
            word = int(words[kind, self._rank, exchange % RING])
            if _is_about(word, exchange) and (sign is None or words[2, self._rank, exchange % RING] == sign):
                return word
            self._refuse_broken()
            if not here:
                if kind == 1:
                    return 0
                raise TransportError(f"rank {rank} of axis {self._axis} {NO_ENGINE}")
            if not alive:
                raise MessageError(rank, f"rank {rank} of axis {self._axis} ended")
            if now - began > self._timeout:
                raise TransportError(
                    f"rank {rank} of axis {self._axis} did not come within {self._timeout:g} s"
                )
            if now - began < PATIENCE:
                os.sched_yield()
            else:
                time.sleep(min((now - began) / 4, 2e-3))

    def _refuse_broken(self) -> None:
        if self._broken:
            raise TransportError(self._broken)
        self._watch.check()


class Heaps(Resource):
    """The heap of this process, and those of others that it reads, by their tokens."""

    def __init__(self) -> None:
        self.own: Heap | None = None
        self.peers: dict[str, PeerHeap] = {}

    def close(self) -> None:
        for each in (self.own, *self.peers.values()):
            if each is not None:
                each.close()


def _take_down(words: np.ndarray, pid: int) -> None:
    if pid == os.getpid():
        words[-1] = 0


def heap() -> Heap | None:
    """Return this process' heap in the current world; None where the system has no such memory, or its
    processor may reorder writes."""
    heaps = current().of(Heaps)
    possible = (
        hasattr(os, "memfd_create")
        and Path("/proc/self/fd").is_dir()
        and platform.machine() in ("x86_64", "AMD64")
    )
    # a forked child must not allocate from its parent's
    if possible and (heaps.own is None or heaps.own.pid != os.getpid()):
        heaps.own = Heap()
    return heaps.own


def open_peer(pid: int, file: int, token: str) -> PeerHeap | None:
    """Open another process' heap by `PeerHeap.open`, once for each heap."""
    peers = current().of(Heaps).peers
    if token not in peers:
        opened = PeerHeap.open(pid, file, token)
        if opened is None:
            return None
        peers[token] = opened
    return peers[token]


def _refuse_closed(file: int) -> None:
    if file < 0:
        raise TransportError(CLOSED)


def _word(exchange: int, offset: int) -> int:
    return exchange % NUMBERS << OFFSET_BITS | offset + 1


def _is_about(word: int, exchange: int) -> bool:
    """Return whether a word of a board was written for this exchange, or for a later one."""
    return word != 0 and ((word >> OFFSET_BITS) - exchange) % NUMBERS < NUMBERS // 2


@contextlib.contextmanager
def _limits(what: str) -> Iterator[None]:
    """Turn an OSError for shared memory into TransportError, which names the process limit that caused it."""
    try:
        yield
    except OSError as error:
        option, kind = LIMITS.get(error.errno or 0, ("", resource.RLIMIT_AS))
        most = resource.getrlimit(kind)[0] if option else resource.RLIM_INFINITY
        reason, way = error.strerror, ""
        if most != resource.RLIM_INFINITY:
            reason = f"`ulimit -{option}` of {most:,} is too low"
            way = f"raise it (`ulimit -{option}`, or in the batch system), or "
        raise TransportError(
            f"no memory for {what} that ranks of one host share: "
            f"{reason}; {way}set mesh.shared_memory = false"
        ) from error
