"""The interface of a tier: a store of extents, flat byte strings of known sizes, used in an order that is
known before.

Invariant: whatever the tier, an extent is the same bytes after the same changes. No communication: a tier is
of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor


@dataclass
class Traffic:
    """What went through a tier since it was made."""

    read: int = 0
    """Bytes out of the tier, as they moved: of files whole multiples of disk.ALIGNMENT."""
    written: int = 0
    """Bytes into it."""
    waited: float = 0.0
    """Seconds that users of its streams stood still for it."""


class Stream(Protocol):
    """What `Store.stream` returns: an iterator over extents, which may be closed before its end, as a
    generator may."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Tensor: ...
    def close(self) -> None: ...


class Store(ABC):
    """First all extents are reserved, then `commit` takes their space, then they are used; all are zeros at
    first.

    One stream is open at a time, and `read` and `write` find none open: each of these ends an earlier stream,
    whose user gets a TierError if it asks for more; one that nothing was taken from yet begins anew instead.
    A failed transfer is a TierError, then and whenever the tier is asked again, because its extents are not
    whole."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Bytes of each extent."""
        self.traffic = Traffic()

    def reserve(self, nbytes: int) -> int:
        """The number of a new extent of `nbytes` bytes, which may be 0."""
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def check_range(self, extent: int, start: int, stop: int) -> None:
        """ValueError unless the extent has the bytes [start, stop)."""
        if not 0 <= start <= stop <= self.sizes[extent]:
            raise ValueError(f"bytes {start} to {stop} of extent {extent}, which has {self.sizes[extent]}")

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(self.sizes)

    @property
    @abstractmethod
    def buffers(self) -> int:
        """Bytes of host memory that it takes, of extents or to move them; the same from `commit` on."""

    @abstractmethod
    def commit(self) -> None:
        """Take the space of all extents. TierError, with what is needed and what is free, where there is too
        little."""

    @abstractmethod
    def stream(self, order: Sequence[int], write: bool = True, read: bool = True) -> Stream:
        """The bytes of each extent of `order`, one after the other (any may come again): a uint8 tensor of
        the CPU that begins at a page.

        It is good until the next one is asked for or the stream is closed, and what was changed in it until
        then is kept; `write=False` promises that nothing is, `read=False` that every byte is set, whatever it
        was. Reading ahead begins at once, not when the first is asked for. A stream that is dropped ends when
        the tier is used again."""

    @abstractmethod
    def read(self, extent: int, start: int, stop: int) -> Tensor:
        """A copy of the extent's bytes [start, stop), whatever their alignment. Slower than a stream."""

    @abstractmethod
    def write(self, extent: int, start: int, data: Tensor) -> None:
        """Change the extent's bytes from `start` on to those of `data`, a flat tensor of the CPU. Slower than
        a stream."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Further calls do nothing."""
