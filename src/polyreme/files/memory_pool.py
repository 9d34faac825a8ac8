"""Memory that is reused, as freshly mapped memory costs a page fault every 4 KiB. No communication."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, torch.dtype]
New = Callable[[int, torch.dtype], Tensor]
Use = Callable[[Tensor, Any], None]


class MemoryPool:
    """A pool of flat pieces of memory by elements and dtype, each lent to one user at a time, in any thread.

    A piece comes with the event with which it was given back, which the next user waits for before writing to
    it; None means that it is free. At most `keep` pieces of a size are kept for reuse."""

    def __init__(self, keep: float = inf) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._free: dict[Key, deque[tuple[Tensor, Any]]] = defaultdict(deque)
        self._users: dict[Key, deque[Use]] = defaultdict(deque)

    @property
    def pieces(self) -> list[Tensor]:
        """The pieces that wait here for their next use."""
        with self._changed:
            return [memory for free in self._free.values() for memory, _ in free]

    @property
    def waiting(self) -> int:
        """Bytes that wait here for their next use."""
        return sum(memory.nbytes for memory in self.pieces)

    def lend(self, size: int, dtype: torch.dtype = torch.uint8, new: New | None = None) -> tuple[Tensor, Any]:
        """Return an uninitialised piece, and the event after which it is free. Where none is there,
        `new(size, dtype)` makes one; without `new`, wait for one. The pool does not keep `new`, which may
        reference the pool's owner."""
        with self._changed:
            self._changed.wait_for(lambda: self._free[size, dtype] or new)
            if self._free[size, dtype] or not new:
                return self._free[size, dtype].popleft()
        return new(size, dtype), None

    def when_free(self, use: Use, size: int, dtype: torch.dtype = torch.uint8) -> None:
        """Call `use` with what `lend` returns, never a new piece: now, or in the thread that gives one
        back."""
        with self._changed:
            if not self._free[size, dtype]:
                self._users[size, dtype].append(use)
                return
            piece = self._free[size, dtype].popleft()
        use(*piece)

    def give(self, memory: Tensor, event: Any = None) -> None:
        """Give a piece, which is free after `event`, back for the next use of its size and dtype."""
        key = memory.numel(), memory.dtype
        with self._changed:
            if not self._users[key]:
                if len(self._free[key]) < self._keep:
                    self._free[key].append((memory, event))
                    self._changed.notify_all()
                return
            use = self._users[key].popleft()
        use(memory, event)

    def add(self, memory: Tensor, size: int) -> None:
        """Cut flat memory into pieces of `size` elements, to be lent."""
        for piece in memory.view(-1, size):
            self.give(piece)

    def drop(self, but: set[int]) -> list[tuple[Tensor, Any]]:
        """Remove and return the waiting pieces of other sizes than `but`, with their events."""
        with self._changed:
            return [piece for key in [*self._free] if key[0] not in but for piece in self._free.pop(key)]
