"""The interface of a tier: a store of extents, flat byte strings that are off the device, in host memory or
in files. Optimizer states, parameters, gradients and activations are extents of one.

Invariant: whatever the tier, an extent is the same bytes after the same changes. No communication: a tier is
of one rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from polyreme.distributed.sums import sum_into
from polyreme.errors import TierError
from polyreme.files.direct_io import padded
from polyreme.layout.region import Stored
from polyreme.offload.copy_stream import CopyStream
from polyreme.offload.space import Allocation, Space

Then = Callable[[Tensor], object]
"""A function of numbers of an extent, on the CPU."""


@dataclass
class Traffic:
    """What went through a tier since it was made."""

    read: int = 0
    """Bytes out of the tier, as they moved: of files whole multiples of ALIGNMENT."""
    written: int = 0
    """Bytes into it."""
    waited: float = 0.0
    """Seconds that its users stood still for it."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - began


class Stream(Protocol):
    """What `Store.stream` returns: an iterator over extents, which may be closed before its end, as a
    generator may."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Tensor: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Opened:
    """One extent in host memory, from `Store.open` to `close`."""

    memory: Tensor
    """Its bytes (uint8, from a page on), once they have arrived."""
    is_near: Callable[[], bool]
    """Tells whether `arriving` returns at once."""
    arriving: Callable[[], Any]
    """Returns when the bytes are there, but for what is still being copied from the device, which ends at the
    event that is returned, if any."""
    close: Callable[[Any], None]
    """Lets go of the memory, and keeps what was changed in it. Takes the event at which what is being copied
    to the device or from there is complete, or None."""

    def wait(self) -> Tensor:
        """The memory, when the CPU may use it."""
        if (event := self.arriving()) is not None:
            event.synchronize()
        return self.memory


def add_when(
    arrived: Any, numbers: Tensor, memory: Tensor, dtype: torch.dtype, first: bool, then: Then | None
) -> None:
    """Add `numbers`, once the event has come, to those of an extent that has this memory: see `Store.add`."""
    if arrived is not None:
        arrived.synchronize()
    total = memory[: numbers.numel() * dtype.itemsize].view(dtype)
    sum_into(total, [numbers], accumulate=not first)
    if then is not None:
        then(total)


class Store(ABC):
    """Extents that are reserved come into being at once with `commit`, as zeros; those that are reserved
    later at any time, with any bytes, and go when they are released.

    What is changed by one call is what the next one sees, though `put`, `add` and the end of an `Opened` may
    go on behind. One stream is open at a time, and other calls find none open: each of them ends an earlier
    stream, whose user gets a TierError if it asks for more; one that nothing was taken from yet begins anew
    instead. `get` may be called in any thread, and `put` of bytes that lie on the CPU; others in one. A
    failed transfer is a TierError, then and whenever the tier is asked again until the extent is released,
    because it is not whole."""

    in_memory: bool
    """Whether extents lie in host memory, where they can be used in place."""

    def __init__(self, spaces: Sequence[Space], turn: int = 0, copy_stream: CopyStream | None = None) -> None:
        """`spaces` have an extent in turn, from number `turn` on. Bytes come from the device by
        `copy_stream`."""
        self.sizes: dict[int, int] = {}
        """Bytes of each extent."""
        self.traffic = Traffic()
        self.copy_stream = CopyStream() if copy_stream is None else copy_stream
        self._spaces, self._turn, self._numbers = spaces, turn, count()
        self._allocations: dict[int, Allocation] | None = None
        self._released: deque[int] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(self.sizes.values())

    @property
    def taken(self) -> int:
        """Bytes of memory or files that it has for extents."""
        return sum(space.nbytes for space in self._spaces)

    @property
    @abstractmethod
    def buffers(self) -> int:
        """Bytes of host memory that it takes, of extents or to move them."""

    def reserve(self, nbytes: int) -> int:
        """The number of a new extent of `nbytes` bytes, which may be 0. TierError where there is too little
        room for one after `commit`."""
        extent = next(self._numbers)
        if self._allocations is not None:
            for _ in range(len(self._released)):
                released = self._released.popleft()
                if self._is_busy(released):
                    self._released.append(released)
                else:
                    self._forget(released)
            self._allocations[extent] = self._space(extent).take(nbytes)
        self.sizes[extent] = nbytes
        return extent

    def release(self, extent: int) -> None:
        """Give the extent's room to others, when what is under way has ended. In any thread."""
        self._released.append(extent)

    def commit(self) -> None:
        """Take the space of all extents. TierError, with what is needed and what is free, where there is too
        little."""
        for space, nbytes in zip(self._spaces, self._needed(), strict=True):
            space.grow(nbytes)
        self._allocations = {extent: self._space(extent).take(size) for extent, size in self.sizes.items()}

    @abstractmethod
    def put(self, extent: int, data: Tensor, start: int = 0) -> bool:
        """Begin to set the extent's bytes from `start` on to those of `data`, flat, of the device or the CPU.
        Returns whether it has left its memory; else that is to stay as it is until the copy stream is
        settled."""

    @abstractmethod
    def get(self, extent: int, start: int, stop: int) -> Tensor:
        """A copy of the extent's bytes [start, stop), whatever their alignment. Slower than a stream."""

    @abstractmethod
    def add(
        self, extent: int, data: Tensor, dtype: torch.dtype, first: bool = False, then: Then | None = None
    ) -> bool:
        """Begin to add `data`, as `put` takes it, to the extent's numbers of `dtype`, or to set them to it if
        it is the `first`; what is added is added in the order of calls. Gives the sum to `then`, in whichever
        thread. Returns what `put` does."""

    @abstractmethod
    def open(self, extent: int, read: bool = True, write: bool = False) -> Opened:
        """Begin to bring the extent to host memory, to be used there, and changed with `write`; `read=False`:
        its bytes may be any, and each is set. One is open at a time."""

    @abstractmethod
    def stream(self, order: Sequence[int], write: bool = True) -> Stream:
        """The bytes of each extent of `order`, one after the other (any may come again): a uint8 tensor of
        the CPU that begins at a page.

        It is good until the next one is asked for or the stream is closed, and what was changed in it until
        then is kept; `write=False` promises that nothing is. Reading ahead begins at once, not when the first
        is asked for. A stream that is dropped ends when the tier is used again."""

    @abstractmethod
    def numbers(self, extent: int, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor | Stored:
        """The extent's numbers from byte `start` on: themselves in host memory, or to be read when they are
        needed."""

    @abstractmethod
    def settle(self, extents: Iterable[int] | None = None) -> None:
        """Return when all that was begun of these extents has ended, or of all."""

    def close(self) -> None:
        """Give everything back. Further calls do nothing."""
        for space in self._spaces:
            space.close()
        self._allocations = None

    def _allocation(self, extent: int) -> Allocation:
        if self._allocations is None:
            raise TierError("this tier is closed, or its space was never taken")
        return self._allocations[extent]

    def _space(self, extent: int) -> Space:
        return self._spaces[(extent + self._turn) % len(self._spaces)]

    def _needed(self) -> list[int]:
        """Bytes of each space for what is reserved."""
        return [
            sum(padded(size) for extent, size in self.sizes.items() if self._space(extent) is space)
            for space in self._spaces
        ]

    def _check_range(self, extent: int, start: int, stop: int) -> None:
        """ValueError unless the extent has the bytes [start, stop)."""
        if not 0 <= start <= stop <= self.sizes[extent]:
            raise ValueError(f"bytes {start} to {stop} of extent {extent}, which has {self.sizes[extent]}")

    @abstractmethod
    def _is_busy(self, extent: int) -> bool:
        """Whether something of the extent is under way."""

    def _forget(self, extent: int) -> None:
        """Free the extent, of which nothing is under way."""
        if self._allocations is not None:
            self._space(extent).free(self._allocations.pop(extent))
        del self.sizes[extent]
