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
    """Performs jobs in order, some at a time; once the loan is wanted, those at its end are packed beside that."""

    def __init__(self, jobs: Iterable[Job], loan: Loan, stream: torch.cuda.Stream | None) -> None:
        self._waiting, self._loan, self._stream = deque(jobs), loan, stream
        self._packed: deque[tuple[Job, Tensor]] = deque()
        self._packing = 0
        self._changed = threading.Condition()

    def perform(self, threads: int) -> None:
        """Raises what one of the jobs raised; those that were not begun are dropped then."""
        with ThreadPoolExecutor(threads + 1) as pool:
            packing = pool.submit(self._guarded, self._pack_all)
            try:
                for writing in [pool.submit(self._guarded, self._perform) for _ in range(threads)]:
                    writing.result()
            finally:
                self._loan.give_back()
            packing.result()

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

    def _perform(self) -> None:
        memory = aligned(BLOCK)
        while (taken := self._next()) is not None:
            job, packed = taken
            if packed is None:
                try:
                    packed = job.pack(memory)
                finally:
                    self._was_packed()
            job.put(packed)

    def _next(self) -> tuple[Job, Tensor | None] | None:
        """What is to be written next, with its bytes if they were copied; None: nothing any more."""
        with self._changed:
            while not self._packed and not self._waiting and self._packing:
                self._changed.wait()
            if self._packed:
                return self._packed.popleft()
            if not self._waiting:
                return None
            self._packing += 1
            return self._waiting.popleft(), None

    def _pack_all(self) -> None:
        self._loan.wait()
        while (job := self._last()) is not None:
            kept = None
            try:
                kept = job, job.pack(aligned(job.nbytes))
            finally:
                self._was_packed(kept)

    def _last(self) -> Job | None:
        with self._changed:
            if not self._waiting:
                return None
            self._packing += 1
            return self._waiting.pop()

    def _was_packed(self, kept: tuple[Job, Tensor] | None = None) -> None:
        with self._changed:
            self._packing -= 1
            if kept is not None:
                self._packed.append(kept)
            if not self._waiting and not self._packing:
                self._loan.give_back()
            self._changed.notify_all()
