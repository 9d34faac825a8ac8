"""Extents in files: read ahead and written behind by threads, through a few buffers that are used in turn.

Invariants: position p of a stream's order has buffer p % len(buffers), and what that held before is written
first. No extent is read while an earlier change of it may be on the way. Only the thread that uses a tier
starts transfers. No communication."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from polyreme.errors import TierError
from polyreme.files.direct_io import ALIGNMENT, File, aligned, check_space, padded
from polyreme.files.folder_lock import Claim
from polyreme.layout.intervals import round_down
from polyreme.offload.store import Store

log = logging.getLogger(__name__)

BUFFERS = 5
"""One in use, and where as much is written as read, two that are read ahead and two that are written
behind."""
THREADS = 2


class FileStore(Store):
    """Extents in nameless files of `folders`, which are made if need be and are claimed for `run` until
    `close` (see Claim).

    Extent i is in folder (i + rank) % len(folders), so that ranks which go through their extents together use
    all disks. All the memory that it takes are `buffers` times the largest extent, pinned with `pin`. Raises
    TierError where a folder cannot be used or is another run's."""

    def __init__(
        self,
        folders: Sequence[Path | str],
        rank: int,
        run: str,
        *,
        buffers: int = BUFFERS,
        threads: int = THREADS,
        pin: bool = False,
    ) -> None:
        super().__init__()
        self.folders = [Path(folder) for folder in folders]
        self._rank = rank
        self._count = buffers
        self._pin = pin
        self._claims = [Claim(folder, run) for folder in self.folders]
        self._files: list[File] = []
        self._positions: list[tuple[File, int]] = []
        self.ring: list[Tensor] = []
        """The buffers, from `commit` on."""
        self._pool = ThreadPoolExecutor(threads, "tier")
        self._lock = threading.Lock()  # guards the counts of traffic
        self._alone = threading.Lock()  # held by `read` and `write`, which any thread may call
        self._stream: FileStream | None = None
        self._failure: Exception | None = None

    @property
    def buffers(self) -> int:
        return self._count * padded(max(self.sizes, default=0))

    def commit(self) -> None:
        ends, positions = [0] * len(self.folders), []
        for extent, size in enumerate(self.sizes):
            which = (extent + self._rank) % len(ends)
            positions.append((which, ends[which]))
            ends[which] += padded(size)
        needed = dict.fromkeys(self.folders, 0)
        for folder, nbytes in zip(self.folders, ends, strict=True):
            needed[folder] += nbytes
        check_space(needed)
        self._files = [File(folder, nbytes) for folder, nbytes in zip(self.folders, ends, strict=True)]
        for file in self._files:
            if not file.direct:
                log.warning("%s: no direct transfers there, so they go through the page cache", file.folder)
        self._positions = [(self._files[which], at) for which, at in positions]
        memory, largest = aligned(self.buffers, self._pin), self.buffers // self._count
        self.ring = [memory[i * largest : (i + 1) * largest] for i in range(self._count)]

    def stream(self, order: Sequence[int], write: bool = True, read: bool = True) -> FileStream:
        stream = FileStream(self, order, write, read)
        self.begin(stream)
        return stream

    def begin(self, stream: FileStream) -> None:
        """Have it be the open one, and read ahead."""
        self._settle()
        self._stream = stream
        stream.begin()

    def read(self, extent: int, start: int, stop: int) -> Tensor:
        self.check_range(extent, start, stop)
        with self._alone:
            self._settle()
            first = round_down(start, ALIGNMENT)
            window = self.ring[0][: padded(stop) - first]
            self.move("read", extent, window, first)
            self.check()
            return window[start - first : stop - first].clone()

    def write(self, extent: int, start: int, data: Tensor) -> None:
        stop = start + data.nbytes
        self.check_range(extent, start, stop)
        with self._alone:
            self._settle()
            first = round_down(start, ALIGNMENT)
            window = self.ring[0][: padded(stop) - first]
            if start > first or (stop % ALIGNMENT and stop < self.sizes[extent]):  # what is beside it stays
                self.move("read", extent, window, first)
            window[start - first : stop - first] = data.view(torch.uint8)
            self.move("write", extent, window, first)
            self.check()

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(TierError):  # its extents are given up
                self._stream.close()
        self._pool.shutdown()
        for file in self._files:
            file.close()
        for claim in self._claims:
            claim.close()
        self._files, self._positions, self.ring = [], [], []

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have a thread do `work`."""
        return self._pool.submit(work)

    def move(self, what: Literal["read", "write"], extent: int, memory: Tensor, at: int = 0) -> None:
        """Read all of `memory` from the extent's bytes from `at` on, or write it there. In any thread;
        `check` raises its errors."""
        file, begin = self._positions[extent]
        if self._failure is not None:
            return
        try:
            getattr(file, what)(memory, begin + at)
        except Exception as error:
            self._failure = error
            return
        with self._lock:
            self.traffic.read += memory.nbytes if what == "read" else 0
            self.traffic.written += memory.nbytes if what == "write" else 0

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        if self._failure is not None:
            raise TierError(
                f"a transfer failed, and what the tier holds is not whole any more: {self._failure}"
            ) from self._failure

    def _settle(self) -> None:
        """End the stream that may be open."""
        if not self._files:
            raise TierError("this tier is closed, or its space was never taken")
        if self._stream is not None:
            self._stream.give_way()
            self._stream = None
        self.check()


class FileStream:
    """A Stream of a FileStore, of one thread. It stays open when it is dropped, until the tier is used
    again."""

    def __init__(self, store: FileStore, order: Sequence[int], write: bool, read: bool) -> None:
        self._store, self._order, self._write, self._read = store, list(order), write, read
        self._position, self._using = 0, False  # position of the extent in use, or else of the next one
        self._jobs: dict[int, Future[None]] = {}  # keys: the position that the buffer goes on to
        self._taken = self._superseded = self._waits = False
        self.closed = False

    def begin(self) -> None:
        """Read ahead."""
        self._waits = False
        for position in range(-len(self._store.ring), 0):
            self._pass_on(position)

    def give_way(self) -> None:
        """Let the tier be used for something else. If nothing was taken yet, this begins anew when
        something is."""
        if self.closed:
            return
        if self._taken:
            self.close()
            self._superseded = True
            return
        self._waits = True
        wait(self._jobs.values())
        self._jobs.clear()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        if self._waits and not self.closed:
            self._store.begin(self)
        self._taken = True
        if not self.closed:
            self._advance()
        if self._superseded:
            raise TierError(
                "this stream ended early, because the tier was asked for something else meanwhile"
            )
        if self.closed:
            raise StopIteration
        return self._buffer(self._position)[: self._store.sizes[self._order[self._position]]]

    def close(self) -> None:
        """Return when everything is written, what is in use, too. Raises what failed."""
        if self.closed:
            return
        self.closed = True
        began = time.perf_counter()
        if self._using and self._write:
            self._store.move("write", self._order[self._position], self._buffer(self._position))
        self._using = False
        wait(self._jobs.values())
        self._store.traffic.waited += time.perf_counter() - began
        self._store.check()

    def _advance(self) -> None:
        """Go on to the next extent; behind the last one, and after a failure, close."""
        if self._using:
            self._using = (
                False  # first: whatever interrupts this, a buffer that another has is not written again
            )
            self._pass_on(self._position)
            self._position += 1
        if self._position == len(self._order):
            self.close()
            return
        began = time.perf_counter()
        late, job = self._is_late(self._position), self._jobs.pop(self._position, None)
        wait([*([job] if job is not None else []), *(self._jobs.values() if late else [])])
        if late and self._read:
            self._store.move("read", self._order[self._position], self._buffer(self._position))
        self._store.traffic.waited += time.perf_counter() - began
        if self._store.failed:
            self.close()
        self._using = not self.closed

    def _pass_on(self, position: int) -> None:
        """Have a thread write what is in the buffer of `position`, and read what it holds next; the first
        positions take theirs from negative ones, of which nothing is written."""
        coming = position + len(self._store.ring)
        old = position if self._write and position >= 0 else None
        new = coming if self._read and coming < len(self._order) and not self._is_late(coming) else None
        if old is not None or new is not None:
            self._jobs[coming] = self._store.submit(lambda: self._turn(old, new))

    def _turn(self, old: int | None, new: int | None) -> None:
        if old is not None:
            self._store.move("write", self._order[old], self._buffer(old))
        if new is not None and not self.closed and not self._waits:
            self._store.move("read", self._order[new], self._buffer(new))

    def _is_late(self, position: int) -> bool:
        """Whether its extent has an earlier position whose change may not be written yet when this one could
        be read ahead, or might be written after this one's: one of those that the buffers are still for, or
        of as many before, which may be on their way."""
        return (
            self._write
            and self._order[position]
            in self._order[max(0, position - 2 * len(self._store.ring) + 1) : position]
        )

    def _buffer(self, position: int) -> Tensor:
        return self._store.ring[position % len(self._store.ring)][
            : padded(self._store.sizes[self._order[position]])
        ]
