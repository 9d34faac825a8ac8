"""Reduced gradients in files: written behind backward by threads, which add up those of several micro-batches, and read ahead of the
update.

Invariants: a record has the elements that a record of the optimizer's numbers has, so that the update goes through both in one order; what
is added is added in the order in which it was taken. No communication between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.gloo_direct import sum_into
from polyreme.files.direct_io import padded
from polyreme.offload.copy_stream import Lane
from polyreme.offload.file import THREADS, FileTier
from polyreme.offload.gradients import Final
from polyreme.offload.optimizer_states import Records
from polyreme.offload.store import Stream


class Spill:
    """Of all buckets of a rank, in `tier`, to which they go by `lane`. `adds`: see Hold."""

    def __init__(self, tier: FileTier, lane: Lane, adds: bool) -> None:
        self.tier, self.lane, self.adds = tier, lane, adds
        self.sums: SimpleQueue[Tensor] = SimpleQueue()
        """Memory for what gradients are added to: of each thread."""
        self._holds: list[FileHold] = []

    def hold(self, records: Records, region: slice, dtype: torch.dtype) -> FileHold:
        """Room for the gradients of one bucket's `region`, cut as `records` are. To be asked for before the tier is committed."""
        self._holds.append(FileHold(self, [(each.run.start - region.start, each.run.stop - region.start) for each in records], dtype))
        return self._holds[-1]

    def stream(self, order: Sequence[int]) -> Stream:
        """What the holds have, record by record, to be read once."""
        for hold in self._holds:
            hold.complete()
        return self.tier.stream(order, write=False)

    def begin(self) -> Tensor:
        """Memory for a record, which goes back to `free` when it is written. The tier's, which is not streamed meanwhile."""
        began = time.perf_counter()
        memory = self.free.get()
        self.tier.traffic.waited += time.perf_counter() - began
        self.tier.check()
        return memory

    @cached_property
    def free(self) -> SimpleQueue[Tensor]:
        """Memory for gradients. Asked for first by `begin`, before any thread does."""
        found: SimpleQueue[Tensor] = SimpleQueue()
        for i, memory in enumerate(self.tier.ring):
            (self.sums if self.adds and i < THREADS else found).put(memory)
        return found


class FileHold:
    """A Hold. `parts`: the elements of each of its records."""

    def __init__(self, spill: Spill, parts: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self.adds, self._spill, self._parts, self._dtype = spill.adds, spill, parts, dtype
        self._records = [spill.tier.reserve((stop - start) * dtype.itemsize) for start, stop in parts]
        self.order: Sequence[int] | None = self._records
        self._jobs: dict[int, Future[None]] = {}  # the last one of each record
        self._holds = False  # what the next gradient is to be added to

    def take(self, gradient: Tensor, final: Final | None = None) -> bool:
        spill, gone = self._spill, True
        spill.lane.settle()
        for i, (start, stop) in enumerate(self._parts):
            memory, part = spill.begin(), gradient[start:stop]
            arrived = spill.lane.out(part.view(torch.uint8), memory[: part.nbytes])
            gone &= arrived is None
            self._jobs[i] = spill.tier.submit(partial(self._store, i, memory, part.dtype, arrived, self._jobs.get(i), self._holds, final))
        self._holds = self.adds
        return gone

    def _store(
        self, i: int, memory: Tensor, dtype: torch.dtype, arrived: Any, before: Future[None] | None, holds: bool, final: Final | None
    ) -> None:
        """In a thread: write the gradient that will have arrived in `memory`, or its sum with what record i `holds`."""
        spill, (start, stop), number = self._spill, self._parts[i], self._records[i]
        size = padded(spill.tier.sizes[number])
        try:
            if before is not None:
                before.result()
            if arrived is not None:
                arrived.synchronize()
            if not self.adds:
                spill.tier.move("write", number, memory[:size])
                return
            total = spill.sums.get()
            try:
                if holds:
                    spill.tier.move("read", number, total[:size])
                numbers = total[: (stop - start) * self._dtype.itemsize].view(self._dtype)
                sum_into(numbers, [memory[: (stop - start) * dtype.itemsize].view(dtype)], accumulate=holds)
                if final is not None:
                    final(numbers, start)
                spill.tier.move("write", number, total[:size])
            finally:
                spill.sums.put(total)
        finally:
            spill.free.put(memory)

    def complete(self) -> None:
        for job in self._jobs.values():
            job.result()
        self._spill.tier.check()

    def numbers(self) -> Tensor:
        raise RuntimeError("these gradients are in files, and come by `Spill.stream`")

    def clear(self) -> None:
        wait(self._jobs.values())
        self._spill.lane.settle()
        self._jobs.clear()
        self._holds = False
