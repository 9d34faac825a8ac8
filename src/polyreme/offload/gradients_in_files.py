"""Reduced gradients in files: written behind backward by threads, which add up those of several
micro-batches, and read ahead of the update.

Invariants: an extent has the elements that an extent of the optimizer's numbers has, so that the update goes
through both in one order; what is added is added in the order in which it was taken. No communication between
ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.sums import sum_into
from polyreme.files.direct_io import padded
from polyreme.layout.intervals import Interval, overlap
from polyreme.offload.copy_stream import CopyStream
from polyreme.offload.file import THREADS, FileStore
from polyreme.offload.gradients import Final
from polyreme.offload.optimizer_states import OffloadedStates
from polyreme.offload.store import Stream


class GradientFiles:
    """The gradients of all buckets of a rank, in `store`, to which they go by `copy_stream`. `adds`: see
    GradientStore."""

    def __init__(self, store: FileStore, copy_stream: CopyStream, adds: bool) -> None:
        self.store, self.copy_stream, self.adds = store, copy_stream, adds
        self.sums: SimpleQueue[Tensor] = SimpleQueue()
        """Memory for what gradients are added to: of each thread."""
        self._gradients: list[FileGradients] = []

    def gradients_of(self, states: OffloadedStates, region: slice, dtype: torch.dtype) -> FileGradients:
        """Room for the gradients of one bucket's `region`, cut as `states` are. To be asked for before the
        tier is committed."""
        self._gradients.append(
            FileGradients(
                self,
                [Interval(each.run.start - region.start, each.run.stop - region.start) for each in states],
                dtype,
            )
        )
        return self._gradients[-1]

    def stream(self, order: Sequence[int]) -> Stream:
        """The gradients of all buckets, extent by extent, to be read once."""
        for gradients in self._gradients:
            gradients.complete()
        return self.store.stream(order, write=False)

    def begin(self) -> Tensor:
        """Memory for an extent, which goes back to `free` when it is written. The tier's, which is not
        streamed meanwhile."""
        began = time.perf_counter()
        memory = self.free.get()
        self.store.traffic.waited += time.perf_counter() - began
        self.store.check()
        return memory

    @cached_property
    def free(self) -> SimpleQueue[Tensor]:
        """Memory for gradients. Asked for first by `begin`, before any thread does."""
        found: SimpleQueue[Tensor] = SimpleQueue()
        for i, memory in enumerate(self.store.ring):
            (self.sums if self.adds and i < THREADS else found).put(memory)
        return found


class FileGradients:
    """A GradientStore. `parts`: the elements of each of its extents."""

    def __init__(self, gradient_files: GradientFiles, parts: Sequence[Interval], dtype: torch.dtype) -> None:
        self.adds, self._files, self._parts, self._dtype = gradient_files.adds, gradient_files, parts, dtype
        self._extents = [
            gradient_files.store.reserve((stop - start) * dtype.itemsize) for start, stop in parts
        ]
        self.order: Sequence[int] | None = self._extents
        self._jobs: dict[int, Future[None]] = {}  # the last one of each extent
        self._accumulates = False  # whether the next gradient is added to them

    def put(self, gradient: Tensor, final: Final | None = None) -> bool:
        gradient_files, gone = self._files, True
        gradient_files.copy_stream.settle()
        for i, (start, stop) in enumerate(self._parts):
            memory, part = gradient_files.begin(), gradient[start:stop]
            arrived = gradient_files.copy_stream.out(part.view(torch.uint8), memory[: part.nbytes])
            gone &= arrived is None
            self._jobs[i] = gradient_files.store.submit(
                partial(
                    self._store, i, memory, part.dtype, arrived, self._jobs.get(i), self._accumulates, final
                )
            )
        self._accumulates = self.adds
        return gone

    def _store(
        self,
        i: int,
        memory: Tensor,
        dtype: torch.dtype,
        arrived: Any,
        before: Future[None] | None,
        accumulates: bool,
        final: Final | None,
    ) -> None:
        """Write, in a thread, the gradient that will have arrived in `memory`, or its sum with what extent i
        `accumulates`."""
        gradient_files, (start, stop), number = self._files, self._parts[i], self._extents[i]
        size = padded(gradient_files.store.sizes[number])
        try:
            if before is not None:
                before.result()
            if arrived is not None:
                arrived.synchronize()
            if not self.adds:
                gradient_files.store.move("write", number, memory[:size])
                return
            total = gradient_files.sums.get()
            try:
                if accumulates:
                    gradient_files.store.move("read", number, total[:size])
                numbers = total[: (stop - start) * self._dtype.itemsize].view(self._dtype)
                sum_into(
                    numbers, [memory[: (stop - start) * dtype.itemsize].view(dtype)], accumulate=accumulates
                )
                if final is not None:
                    final(numbers, start)
                gradient_files.store.move("write", number, total[:size])
            finally:
                gradient_files.sums.put(total)
        finally:
            gradient_files.free.put(memory)

    def complete(self) -> None:
        for job in self._jobs.values():
            job.result()
        self._files.store.check()

    def get(self) -> Tensor:
        raise RuntimeError("these gradients are in files, and come by `GradientFiles.stream`")

    def read(self, start: int, stop: int) -> Tensor:
        found = torch.zeros(stop - start, dtype=self._dtype)  # padding is in no extent
        for number, low, high, at in self._within(start, stop):
            found[low - start : high - start] = self._files.store.read(
                number, at, at + (high - low) * self._dtype.itemsize
            ).view(self._dtype)
        return found

    def write(self, start: int, flat: Tensor) -> None:
        for number, low, high, at in self._within(start, start + flat.numel()):
            numbers = flat[low - start : high - start].to("cpu", self._dtype)
            self._files.store.write(number, at, numbers)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Extents that have any of the numbers [start, stop): which ones, and from which byte on."""
        self.complete()
        for number, part in zip(self._extents, self._parts, strict=True):
            if inside := overlap(Interval(start, stop), part):
                yield number, *inside, (inside.start - part.start) * self._dtype.itemsize

    def clear(self) -> None:
        wait(self._jobs.values())
        self._files.copy_stream.settle()
        self._jobs.clear()
        self._accumulates = False
