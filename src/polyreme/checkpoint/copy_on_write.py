"""Copy on write: memory is written to a disk while its owner goes on computing. When the owner wants to
change it, the bytes that are not written yet are copied at once, as far as there is room, and the owner waits
for the rest. Where the disk is fast enough, nothing is copied, and no memory is taken. No communication."""

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
"""Bytes of memory for one job: a huge page. Larger jobs would not be faster, and the disk is slower with
smaller pages (bench/LOG.md)."""


Work = Callable[[], None]


class BackgroundAccess:
    """Permission to read the owner's memory in the background, until the owner takes it back."""

    def __init__(self) -> None:
        self._wanted, self._returned = threading.Event(), threading.Event()

    def take_back(self) -> None:
        """Ask for the memory, and wait until it is read (by the owner)."""
        self._wanted.set()
        self._returned.wait()

    def give_back(self) -> None:
        """Say that the memory is not read any more (by the borrower)."""
        self._returned.set()
        self._wanted.set()

    def wait(self) -> None:
        """Wait until the owner asks for the memory, or it was given back (by the borrower)."""
        self._wanted.wait()


class Job(NamedTuple):
    """A piece to write. nbytes: memory that it needs, in whole pages, at most BLOCK. pack: copies the owner's
    bytes into that memory, and returns them as a view of it. put: writes that view."""

    nbytes: int
    pack: Callable[[Tensor], Tensor]
    put: Callable[[Tensor], None]


class JobQueue:
    """Performs jobs in order, several at a time: some threads pack, others only write, so that the disk never
    waits for a copy. They share `buffers` blocks of memory, and up to `room` bytes more once the owner wants
    its memory."""

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
        """(job, packed view, its block); None is the last."""
        self._left, self._counting, self._room = len(self._waiting), threading.Lock(), room

    def perform(self, packers: int, writers: int, beside: Work | None = None) -> None:
        """Perform all jobs with so many threads. beside: called by this thread meanwhile. Raises the error of
        `beside` or of a job, and drops the jobs that were not begun then."""
        if not self._left:
            self._end()
        with ThreadPoolExecutor(packers + writers + 1) as pool:
            watching = pool.submit(self._watch)
            try:
                # writers first: they wait at once, while a packer would hold up the start of the others
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
        """Release everyone who waits: all jobs are packed, or no more will be."""
        self._access.give_back()
        self._blocks.give(torch.empty(1, dtype=torch.uint8).expand(BLOCK))  # nobody writes to it any more
        self._packed.put(None)

    def _watch(self) -> None:
        """Add blocks for the remaining jobs once the owner wants its memory."""
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
