"""The interface of a tier: a store of extents, flat byte strings that are off the device, in host memory or
in files. Optimizer states, parameters, gradients and activations are extents of one.

Invariant: in any tier, an extent has the same bytes after the same changes. No communication: a tier belongs
to one rank."""

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
"""A callback with numbers of an extent, on the CPU."""


@dataclass
class Traffic:
    """The traffic of a tier since it was made."""

    read: int = 0
    """Bytes out of the tier, as they moved: from files whole multiples of ALIGNMENT."""
    written: int = 0
    """Bytes into the tier."""
    waited: float = 0.0
    """Seconds that its users waited for it."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the caller waits inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - began


class Stream(Protocol):
    """The result of `Store.stream`: an iterator over extents, which may be closed before its end, as a
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
    """Returns whether `arriving` returns at once."""
    arriving: Callable[[], Any]
    """Waits until the bytes are in memory, except those being copied from the device. Returns the event for
    the end of that copy, or None."""
    close: Callable[[Any], None]
    """Releases the memory, and keeps changes in it. Takes the event for the end of a copy to or from the
    device, or None."""

    def wait(self) -> Tensor:
        """Return the memory, once the CPU may use it."""
        if (event := self.arriving()) is not None:
            event.synchronize()
        return self.memory


def add_when(
    arrived: Any, numbers: Tensor, memory: Tensor, dtype: torch.dtype, first: bool, then: Then | None
) -> None:
    """Add `numbers`, after the event, to those of an extent with this memory: see `Store.add`."""
    if arrived is not None:
        arrived.synchronize()
    total = memory[: numbers.numel() * dtype.itemsize].view(dtype)
    sum_into(total, [numbers], accumulate=not first)
    if then is not None:
        then(total)


class Store(ABC):
    """A store of extents. Extents that are reserved before `commit` are made at once with it, as zeros; later
    ones at any time, with any bytes, until they are released.

    A call sees the changes of the calls before it, though `put`, `add` and the end of an `Opened` may
    continue in the background. One stream is open at a time. Any other call ends it: its user gets a
    TierError if it asks for more; a stream from which nothing was taken yet begins anew instead. `get` may be
    called in any thread, and `put` of bytes on the CPU; other calls in one. A failed transfer is a TierError
    then and at each later call until the extent is released, because its bytes are not complete."""

    in_memory: bool
    """True if extents lie in host memory, where they can be used in place."""

    def __init__(self, spaces: Sequence[Space], turn: int = 0, copy_stream: CopyStream | None = None) -> None:
        """`spaces` take extents in turn, from number `turn` on. `copy_stream` copies bytes from the
        device."""
        self.sizes: dict[int, int] = {}
        """Bytes of each extent."""
        self.traffic = Traffic()
        self.copy_stream = CopyStream() if copy_stream is None else copy_stream
        self._spaces, self._turn, self._numbers = spaces, turn, count()
        self._allocations: dict[int, Allocation] | None = None
        self._released: deque[int] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return sum(self.sizes.values())

    @property
    def taken(self) -> int:
        """Bytes of memory or files allocated for extents."""
        return sum(space.nbytes for space in self._spaces)

    @property
    @abstractmethod
    def buffers(self) -> int:
        """Bytes of host memory that it takes, for extents or to move them."""

    def reserve(self, nbytes: int) -> int:
        """Return the number of a new extent of `nbytes` bytes, which may be 0. Raises TierError where there
        is too little room for one after `commit`."""
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
        """Free the extent, once its transfers have ended. In any thread."""
        self._released.append(extent)

    def commit(self) -> None:
        """Allocate all extents. Raises TierError, with the bytes needed and free, where there is too little
        space."""
        for space, nbytes in zip(self._spaces, self._needed(), strict=True):
            space.grow(nbytes)
        self._allocations = {extent: self._space(extent).take(size) for extent, size in self.sizes.items()}

    @abstractmethod
    def put(self, extent: int, data: Tensor, start: int = 0) -> bool:
        """Begin to set the extent's bytes from `start` on to those of `data`, flat, on the device or the CPU.
        Returns whether `data` has left its memory; if not, it must stay unchanged until the copy stream is
        settled."""

    @abstractmethod
    def get(self, extent: int, start: int, stop: int) -> Tensor:
        """Return a copy of the extent's bytes [start, stop), at any alignment. Slower than a stream."""

    @abstractmethod
    def add(
        self, extent: int, data: Tensor, dtype: torch.dtype, first: bool = False, then: Then | None = None
    ) -> bool:
        """Begin to add `data`, as `put` takes it, to the extent's numbers of `dtype`, or, if it is the
        `first`, to set them to `data`. Additions run in the order of calls. Calls `then` with the sum, in any
        thread. Returns what `put` does."""

    @abstractmethod
    def open(self, extent: int, read: bool = True, write: bool = False) -> Opened:
        """Begin to bring the extent to host memory, to be used there, and changed with `write`. `read=False`:
        its bytes may be anything, and the user sets each."""

    @abstractmethod
    def stream(self, order: Sequence[int], write: bool = True) -> Stream:
        """Return an iterator over the bytes of each extent in `order` (any may repeat): uint8 tensors on the
        CPU that begin at a page.

        A tensor is valid until the next one is taken or the stream is closed, and changes in it until then
        are kept; `write=False` promises that there are none. Reading ahead begins at once, not when the first
        is taken. A dropped stream ends when the tier is used again."""

    @abstractmethod
    def numbers(self, extent: int, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor | Stored:
        """Return the extent's numbers from byte `start` on: in place in host memory, or to be read when they
        are needed."""

    @abstractmethod
    def settle(self, extents: Iterable[int] | None = None) -> None:
        """Wait for the transfers of these extents, or of all."""

    def close(self) -> None:
        """Free everything. Further calls do nothing."""
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
        """Return the bytes of each space for the reserved extents."""
        return [
            sum(padded(size) for extent, size in self.sizes.items() if self._space(extent) is space)
            for space in self._spaces
        ]

    def _check_range(self, extent: int, start: int, stop: int) -> None:
        """Raise ValueError unless the extent has the bytes [start, stop)."""
        if not 0 <= start <= stop <= self.sizes[extent]:
            raise ValueError(f"bytes {start} to {stop} of extent {extent}, which has {self.sizes[extent]}")

    @abstractmethod
    def _is_busy(self, extent: int) -> bool:
        """Return whether a transfer of the extent is under way."""

    def _forget(self, extent: int) -> None:
        """Free the extent, which has no transfer under way."""
        if self._allocations is not None:
            self._space(extent).free(self._allocations.pop(extent))
        del self.sizes[extent]
