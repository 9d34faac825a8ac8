"""A bucket's shard of the parameters that is not on the device: in host memory or in a file, from where it
comes for each use.

Invariant: what is fetched is what was stored last; a shard is fetched or open for writing, never both. No
communication."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.work import Work
from polyreme.files.direct_io import aligned, padded
from polyreme.layout.region import Stored
from polyreme.offload.copy_stream import copy_stream_to
from polyreme.offload.file import FileStore
from polyreme.offload.host import HostStore

WRITING = 1
"""Shards that may wait in memory to be written."""


class OffloadedParameters:
    """The shards of all buckets that are in one tier, and the memory through which those of files go."""

    def __init__(self, store: HostStore | FileStore, device: torch.device) -> None:
        self.store, self.copy_stream = store, copy_stream_to(device)
        self._pin = device.type == "cuda"
        # keys: bytes; values: memory, and when it is free
        self._free: dict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)
        self._writing: deque[Future[None]] = deque()
        self._taken = 0

    @property
    def is_far(self) -> bool:
        """Whether what is there has to be waited for: files."""
        return isinstance(self.store, FileStore)

    @property
    def memory(self) -> int:
        """Bytes of host memory that it takes: of all shards, or to move those of files."""
        return self._taken + (self.store.buffers if isinstance(self.store, HostStore) else 0)

    def settle(self) -> None:
        """Return when all is written."""
        while self._writing:
            self._writing.popleft().result()

    def shard(self, elements: int, dtype: torch.dtype) -> OffloadedShard:
        """A new one, of zeros once the tier is committed."""
        return OffloadedShard(self, elements, dtype)

    def take(self, nbytes: int) -> Tensor:
        """Memory that a file can be read into."""
        if self._free[nbytes]:
            memory, event = self._free[nbytes].popleft()
            if event is not None:
                event.synchronize()
            return memory
        self._taken += nbytes
        return aligned(nbytes, self._pin)

    def give(self, memory: Tensor, event: Any = None) -> None:
        """Memory is free, once the event has come."""
        self._free[memory.nbytes].append((memory, event))

    def write(self, extent: int, memory: Tensor) -> Future[None]:
        """Begin to write a file's extent; the memory is free after it."""
        store = self.store
        assert isinstance(store, FileStore)
        while len(self._writing) >= WRITING:
            self._writing.popleft().result()

        def job() -> None:
            store.move("write", extent, memory)
            self.give(memory)

        self._writing.append(store.submit(job))
        return self._writing[-1]


class OffloadedShard:
    """One bucket's: flat, of `elements` numbers."""

    def __init__(self, offloaded: OffloadedParameters, elements: int, dtype: torch.dtype) -> None:
        self.elements, self.dtype = elements, dtype
        self._all, self._store = offloaded, offloaded.store
        self._nbytes = elements * dtype.itemsize
        self._extent = offloaded.store.reserve(self._nbytes)
        self._memory: Tensor | None = None  # what is fetched or open, of a file
        self._copied: Any = None  # when the last copy to the device will have left the memory
        self._reading: Future[None] | None = None
        self._written: Future[None] | None = None
        self._is_open = False

    @property
    def is_near(self) -> bool:
        """Whether it need not be waited for: host memory."""
        return isinstance(self._store, HostStore)

    def write(self, start: int, flat: Tensor) -> None:
        """Set the numbers from `start` on, in their dtype. Slower than `open`."""
        self._after_writing()
        if self._copied is not None:
            self._copied.synchronize()
        self._store.write(self._extent, start * self.dtype.itemsize, flat.to("cpu", self.dtype))

    def fetch(self) -> None:
        """Begin to read it."""
        if isinstance(store := self._store, FileStore) and self._memory is None:
            self._after_writing()
            memory = self._memory = self._all.take(padded(self._nbytes))
            self._reading = store.submit(lambda: store.move("read", self._extent, memory))

    def arrive(self) -> Tensor:
        """The numbers, on the CPU, to be read until `leave`."""
        if isinstance(self._store, HostStore):
            self._store.traffic.read += self._nbytes
        elif self._reading is not None:
            began = time.perf_counter()
            self._reading.result()
            self._reading = None
            self._store.traffic.waited += time.perf_counter() - began
            self._store.check()
        return self._numbers()

    def into(self, target: Tensor) -> Work:
        """Begin to copy the numbers, which were fetched, to `target`, and leave."""
        copy_stream = self._all.copy_stream
        copied = self._copied = copy_stream.into(self.arrive(), target)
        self.leave()
        return Work(finish=lambda: copy_stream.wait(copied))

    def beside(self) -> AbstractContextManager[object]:
        """Where what is begun on the device begins after the copy, whatever is being computed."""
        return self._all.copy_stream.beside()

    def leave(self) -> None:
        """What was fetched is not needed any more."""
        if self._reading is not None:
            self._reading.result()
            self._reading = None
        if self._memory is not None:
            self._all.give(self._memory, self._copied)
            self._memory = self._copied = None

    def open(self, keep: bool) -> Tensor:
        """The numbers, on the CPU, to be changed until `store`; without `keep`, all are zero, or any. The
        same ones when it is open."""
        if isinstance(self._store, FileStore) and self._memory is None:
            if keep:
                self.fetch()
                return self.arrive()
            self._memory = self._all.take(padded(self._nbytes)).zero_()
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._is_open = True
        return self._numbers()

    def store(self) -> None:
        """Keep what was opened. A file is written while other things go on."""
        if isinstance(self._store, HostStore):
            self._store.traffic.written += self._nbytes * self._is_open
            self._is_open = False
        elif self._memory is not None:
            memory, self._memory = self._memory, None
            self._after_writing()
            self._written = self._all.write(self._extent, memory)

    def stored(self) -> Tensor | Stored:
        """The numbers as they are now: in memory, or to be read when they are needed."""
        if isinstance(self._store, HostStore):
            return self._numbers()
        self._after_writing()
        size = self.dtype.itemsize
        return Stored(
            self.dtype,
            (self.elements,),
            lambda start, stop: self._store.read(self._extent, start * size, stop * size).view(self.dtype),
        )

    def _numbers(self) -> Tensor:
        memory = self._store.memory(self._extent) if isinstance(self._store, HostStore) else self._memory
        assert memory is not None, "the shard is neither fetched nor open"
        return memory[: self._nbytes].view(self.dtype)

    def _after_writing(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None
