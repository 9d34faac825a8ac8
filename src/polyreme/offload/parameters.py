"""A bucket's shard of the parameters that is not on the device: in host memory or in a file, from where it
comes for each use.

Invariant: what is fetched is what was stored last; a shard is fetched or open for writing, never both. No
communication."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.work import Work
from polyreme.layout.region import Stored
from polyreme.offload.store import Opened, Store


class OffloadedShard:
    """One bucket's, in an extent of `store`: flat, of `elements` numbers, of zeros at first."""

    def __init__(self, store: Store, elements: int, dtype: torch.dtype) -> None:
        self.elements, self.dtype, self._store = elements, dtype, store
        self._extent = store.reserve(elements * dtype.itemsize)
        self._opened: Opened | None = None
        self._changes = False

    @property
    def is_near(self) -> bool:
        """Whether it need not be waited for: host memory."""
        return self._store.in_memory

    def write(self, start: int, flat: Tensor) -> None:
        """Set the numbers from `start` on, in their dtype. Slower than `open`."""
        self._store.put(self._extent, flat.to("cpu", self.dtype), start * self.dtype.itemsize)

    def fetch(self) -> None:
        """Begin to read it."""
        if self._opened is None:
            self._opened = self._store.open(self._extent)

    def arrive(self) -> Tensor:
        """The numbers, on the CPU, to be read until `leave`."""
        assert self._opened is not None, "the shard is neither fetched nor open"
        return self._opened.wait()[: self.elements * self.dtype.itemsize].view(self.dtype)

    def into(self, target: Tensor) -> Work:
        """Begin to copy the numbers, which were fetched, to `target`, and leave."""
        copy_stream = self._store.copy_stream
        copied = copy_stream.into(self.arrive(), target)
        self.leave(copied)
        return Work(finish=lambda: copy_stream.wait(copied))

    def beside(self) -> AbstractContextManager[object]:
        """Where what is begun on the device begins after the copy, whatever is being computed."""
        return self._store.copy_stream.beside()

    def leave(self, copied: Any = None) -> None:
        """What was fetched is not needed any more, after that event."""
        if self._opened is not None:
            self._opened.close(copied)
        self._opened = None

    def open(self, keep: bool) -> Tensor:
        """The numbers, on the CPU, to be changed until `store`; without `keep`, all are zero, or any. The
        same ones when it is open."""
        if not self._changes:
            self.leave()
            self._opened, self._changes = self._store.open(self._extent, read=keep, write=True), True
            if not keep and not self._store.in_memory:
                self.arrive().zero_()
        return self.arrive()

    def store(self) -> None:
        """Keep what was opened. A file is written while other things go on."""
        if self._changes:
            self.leave()
        self._changes = False

    def stored(self) -> Tensor | Stored:
        """The numbers as they are now: in memory, or to be read when they are needed."""
        return self._store.numbers(self._extent, 0, self.dtype, (self.elements,))
