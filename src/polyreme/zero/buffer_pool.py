"""Buffers of gradients that are used again. Communication: none."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.distributed.work import Work

Buffers = Counter[tuple[int, torch.dtype]]
"""How many flat buffers there are, by elements and dtype."""


class Pool:
    """Flat buffers of gradients that are used again: freshly mapped memory costs a page fault every 4 KiB.
    They are given to `axis` to reduce. On a GPU the allocator does the same, for all sizes at once."""

    def __init__(self, axis: Axis, device: torch.device, keep: int = 2) -> None:
        self._axis, self.device, self._keep = axis, device, keep if device.type == "cpu" else 0
        self._free: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Work]]] = defaultdict(deque)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor."""
        free = self._free[size, dtype]
        if not free:
            return self._axis.empty(size, dtype, self.device)
        buffer, last = free.popleft()
        last.settle()
        return buffer

    def give(self, buffer: Tensor, last: Work) -> None:
        """Hand `buffer`, which `last` reads, back for the next `take` of its size and dtype."""
        free = self._free[buffer.numel(), buffer.dtype]
        if len(free) < self._keep:
            free.append((buffer, last))

    def nbytes(self) -> int:
        """Bytes that wait here for their next use."""
        return sum(buffer.nbytes for free in self._free.values() for buffer, _ in free)
