"""Buffers of gradients that are used again. Communication: none."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.files.memory_pool import MemoryPool

Buffers = Counter[tuple[int, torch.dtype]]
"""How many flat buffers there are, by elements and dtype."""


class Pool(MemoryPool):
    """Flat buffers of gradients that are used again. They are given to `axis` to reduce, and free when that
    Work has settled. On a GPU the allocator does the same, for all sizes at once."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        super().__init__(keep=2 if device.type == "cpu" else 0)
        self.device, self._empty = device, partial(axis.empty, device=device)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor."""
        buffer, last = self.lend(size, dtype, self._empty)
        if last is not None:
            last.settle()
        return buffer
