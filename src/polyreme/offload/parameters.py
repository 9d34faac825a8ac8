"""A bucket's shard of the parameters off the device: in host memory or in a file, from where it comes for
each use.

Invariant: a fetched shard has the numbers that were stored last; it is fetched or open for writing, never
both. No communication."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.work import Work
from polyreme.layout.region import Stored
from polyreme.offload.store import Opened, Store


class OffloadedShard:
    """The parameter shard of one bucket, in an extent of `store`: flat, of `elements` numbers, zero at
    first."""

    def __init__(self, store: Store, elements: int, dtype: torch.dtype) -> None:
        self.elements, self.dtype, self._store = elements, dtype, store
        self._extent = store.reserve(elements * dtype.itemsize)
        self._opened: Opened | None = None
        self._changes = False

    @property
    def is_near(self) -> bool:
        """True if the shard need not be waited for, as in host memory."""
        return self._store.in_memory

    def write(self, start: int, flat: Tensor) -> None:
        """Set the numbers from `start` on, in their dtype. Slower than `open`."""
        self._store.put(self._extent, flat.to("cpu", self.dtype), start * self.dtype.itemsize)

    def fetch(self) -> None:
        """Begin to read the shard."""
        if self._opened is None:
            self._opened = self._store.open(self._extent)

    def arrive(self) -> Tensor:
        """Return the numbers, on the CPU, to be read until `leave`."""
        assert self._opened is not None, "the shard is neither fetched nor open"
        return self._opened.wait()[: self.elements * self.dtype.itemsize].view(self.dtype)

    def into(self, target: Tensor) -> Work:
        """Begin to copy the fetched numbers to `target`, and end their use."""
        copy_stream = self._store.copy_stream
        copied = copy_stream.into(self.arrive(), target)
        self.leave(copied)
        return Work(finish=lambda: copy_stream.wait(copied))

    def beside(self) -> AbstractContextManager[object]:
        """Context in which device work begins after the copy, whatever is being computed."""
        return self._store.copy_stream.beside()

    def leave(self, copied: Any = None) -> None:
        """Give back the memory of the fetched numbers, which may be used again after the event `copied`."""
        if self._opened is not None:
            self._opened.close(copied)
        self._opened = None

    def open(self, keep: bool) -> Tensor:
        """Return the numbers, on the CPU, to be changed until `store`; without `keep`, they are zero or
        anything. A second call before `store` returns the same numbers."""
        if not self._changes:
            self.leave()
            self._opened, self._changes = self._store.open(self._extent, read=keep, write=True), True
            if not keep and not self._store.in_memory:
                self.arrive().zero_()
        return self.arrive()

    def store(self) -> None:
        """Put what was changed in the opened numbers back into the store. A file is written in the
        background."""
        if self._changes:
            self.leave()
        self._changes = False

    def stored(self) -> Tensor | Stored:
        """Return the current numbers: in memory, or to be read when they are needed."""
        return self._store.numbers(self._extent, 0, self.dtype, (self.elements,))
