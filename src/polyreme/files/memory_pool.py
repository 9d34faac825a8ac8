"""Memory that is used again, as freshly mapped memory costs a page fault every 4 KiB. No communication."""

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
    """Flat pieces of memory by elements and dtype, each lent to one user at a time, in any thread.

    A piece comes with the event with which it was given back: whoever takes it waits for that before writing
    to it; None: it is free. At most `keep` pieces of a size are kept for their next use."""

    def __init__(self, keep: float = inf) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._free: dict[Key, deque[tuple[Tensor, Any]]] = defaultdict(deque)
        self._users: dict[Key, deque[Use]] = defaultdict(deque)

    @property
    def waiting(self) -> int:
        """Bytes that wait here for their next use."""
        with self._changed:
            return sum(memory.nbytes for free in self._free.values() for memory, _ in free)

    def lend(self, size: int, dtype: torch.dtype = torch.uint8, new: New | None = None) -> tuple[Tensor, Any]:
        """A piece, uninitialised, and the event at which it is free. Where none is there, `new(size, dtype)`
        makes one; without `new`, wait for one. The pool keeps no `new`, which may keep the pool's owner."""
        with self._changed:
            self._changed.wait_for(lambda: self._free[size, dtype] or new)
            if self._free[size, dtype] or not new:
                return self._free[size, dtype].popleft()
        return new(size, dtype), None

    def when_free(self, use: Use, size: int, dtype: torch.dtype = torch.uint8) -> None:
        """Give `use` what `lend` returns, but no new one: now, or in the thread that gives one back."""
        with self._changed:
            if not self._free[size, dtype]:
                self._users[size, dtype].append(use)
                return
            piece = self._free[size, dtype].popleft()
        use(*piece)

    def give(self, memory: Tensor, event: Any = None) -> None:
        """Hand a piece, which is free at `event`, back for the next use of its size and dtype."""
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
        """The pieces, with their events, that wait here and have other sizes: they are not kept any more."""
        with self._changed:
            return [piece for key in [*self._free] if key[0] not in but for piece in self._free.pop(key)]
