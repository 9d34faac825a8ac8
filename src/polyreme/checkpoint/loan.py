"""Memory that is written to a disk while its owner goes on computing, until the owner wants to change it: then what is not yet written is
copied at once. So where the disk is fast enough, nothing is copied, and no memory taken. No communication."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from polyreme.disk import HUGE_PAGE, aligned

BLOCK = HUGE_PAGE
"""Bytes of memory for one job. Larger ones would not be faster, and pages of less are slower for the disk (docs/LOG.md)."""


class Loan:
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
    """pack: copies `nbytes` bytes (whole pages, at most BLOCK) from where they are lent into the memory, and returns them or a part of
    them. put: writes them."""

    nbytes: int
    pack: Callable[[Tensor], Tensor]
    put: Callable[[Tensor], None]


class Line:
    """Performs jobs in order, some at a time: some threads pack, others do nothing but write, so that the disk never waits for a copy. They
    share `buffers` blocks of memory; once the loan is wanted, what is left is packed into new memory at once."""

    def __init__(self, jobs: Iterable[Job], loan: Loan, stream: torch.cuda.Stream | None, buffers: int) -> None:
        self._waiting, self._loan, self._stream = deque(jobs), loan, stream
        self._free = [*aligned(buffers * BLOCK).split(BLOCK)]
        self._packed: deque[tuple[Job, Tensor, Tensor]] = deque()
        self._packing, self._wanted = 0, False
        self._changed = threading.Condition()

    def perform(self, packers: int, writers: int) -> None:
        """With so many threads. Raises what one of the jobs raised; those that were not begun are dropped then."""
        with ThreadPoolExecutor(packers + writers + 1) as pool:
            watching = pool.submit(self._watch)
            try:
                threads = [pool.submit(self._guarded, self._pack) for _ in range(packers)]
                for thread in [*threads, *(pool.submit(self._guarded, self._write) for _ in range(writers))]:
                    thread.result()
            finally:
                self._loan.give_back()
            watching.result()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with torch.cuda.stream(self._stream):
                work()
        except BaseException:
            with self._changed:
                self._waiting.clear()
                self._packed.clear()
                self._changed.notify_all()
            raise

    def _watch(self) -> None:
        self._loan.wait()
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def _pack(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting or self._free or self._wanted)
                if not self._waiting:
                    return
                job, free = self._waiting.popleft(), self._free.pop() if self._free else None
                self._packing += 1
            done = []
            try:
                memory = aligned(job.nbytes) if free is None else free
                done.append((job, job.pack(memory), memory))
            finally:
                with self._changed:
                    self._packing -= 1
                    self._packed += done
                    if not self._waiting and not self._packing:
                        self._loan.give_back()
                    self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._packed or not (self._waiting or self._packing))
                if not self._packed:
                    return
                job, packed, memory = self._packed.popleft()
            job.put(packed)
            with self._changed:
                if not self._wanted:
                    self._free.append(memory)
                    self._changed.notify_all()
