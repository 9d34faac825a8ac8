"""Copy on write: memory that is written to a disk while its owner goes on computing, until the owner wants to
change it: then what is not yet written is copied at once, as far as there is room, and the owner waits for
the rest. So where the disk is fast enough, nothing is copied, and no memory taken. No communication."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from polyreme.files.direct_io import HUGE_PAGE, aligned
from polyreme.files.memory_pool import MemoryPool

BLOCK = HUGE_PAGE
"""Bytes of memory for one job. Larger ones would not be faster, and pages of less are slower for the disk
(docs/LOG.md)."""


Work = Callable[[], None]


class BackgroundAccess:
    """What others may read until the owner takes it back."""

    def __init__(self) -> None:
        self._wanted, self._returned = threading.Event(), threading.Event()

    def take_back(self) -> None:
        """The owner: return when all was read."""
        self._wanted.set()
        self._returned.wait()

    def give_back(self) -> None:
        """The borrower: all was read, or is not needed any more."""
        self._returned.set()
        self._wanted.set()

    def wait(self) -> None:
        """The borrower: return when it is wanted, or was given back."""
        self._wanted.wait()


class Job(NamedTuple):
    """pack: copies `nbytes` bytes (whole pages, at most BLOCK) from where they are lent into the memory, and
    returns them or a part of them. put: writes them."""

    nbytes: int
    pack: Callable[[Tensor], Tensor]
    put: Callable[[Tensor], None]


class JobQueue:
    """Performs jobs in order, some at a time: some threads pack, others do nothing but write, so that the
    disk never waits for a copy. They share `buffers` blocks of memory; once the owner wants its memory, at
    most `room` bytes of new memory, too."""

    def __init__(
        self,
        jobs: Iterable[Job],
        access: BackgroundAccess,
        stream: torch.cuda.Stream | None,
        buffers: int,
        room: int,
    ) -> None:
        self._waiting, self._access, self._stream = deque(jobs), access, stream
        self._blocks = MemoryPool()
        self._blocks.add(aligned(buffers * BLOCK), BLOCK)
        self._packed: SimpleQueue[tuple[Job, Tensor, Tensor] | None] = SimpleQueue()
        """None: there will be no more."""
        self._left, self._counting, self._room = len(self._waiting), threading.Lock(), room

    def perform(self, packers: int, writers: int, beside: Work | None = None) -> None:
        """Perform all jobs with so many threads. beside: what the calling thread does meanwhile. Raises what
        that, or one of the jobs, raised; those that were not begun are dropped then."""
        if not self._left:
            self._end()
        with ThreadPoolExecutor(packers + writers + 1) as pool:
            watching = pool.submit(self._watch)
            try:
                # those that write first: they wait at once, while one that packs would hold up the start of
                # the others
                threads = [
                    pool.submit(self._guarded, work)
                    for work in (*[self._write] * writers, *[self._pack] * packers)
                ]
                if beside is not None:
                    self._guarded(beside)
                for thread in threads:
                    thread.result()
            finally:
                self._access.give_back()
            watching.result()

    def _guarded(self, work: Work) -> None:
        try:
            with torch.cuda.stream(self._stream):
                work()
        except BaseException:
            self._waiting.clear()
            with contextlib.suppress(Empty):
                while True:
                    self._packed.get_nowait()
            self._end()
            raise

    def _end(self) -> None:
        """All is packed, or nothing more will be: let nobody wait for anything."""
        self._access.give_back()
        self._blocks.give(torch.empty(1, dtype=torch.uint8).expand(BLOCK))  # nobody writes to it any more
        self._packed.put(None)

    def _watch(self) -> None:
        self._access.wait()
        blocks = min(self._room // BLOCK, len(self._waiting))
        self._blocks.add(aligned(blocks * BLOCK), BLOCK)

    def _pack(self) -> None:
        while True:
            memory, _ = self._blocks.lend(BLOCK)
            try:
                job = self._waiting.popleft()
            except IndexError:
                self._blocks.give(memory)  # for the next one
                return
            self._packed.put((job, job.pack(memory), memory))
            with self._counting:
                self._left -= 1
                if not self._left:
                    self._end()

    def _write(self) -> None:
        while (packed := self._packed.get()) is not None:
            job, data, memory = packed
            job.put(data)
            self._blocks.give(memory)
        self._packed.put(None)  # for the next one
