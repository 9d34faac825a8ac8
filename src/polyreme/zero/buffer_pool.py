"""Reused gradient buffers. Communication: none."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.files.memory_pool import MemoryPool

BufferCounts = Counter[tuple[int, torch.dtype]]
"""Numbers of flat buffers, by elements and dtype."""


class Pool(MemoryPool):
    """Flat gradient buffers that are reused.

    They are handed to `axis` for a reduction, and are free when its Work has settled. Kept on CPUs only: on a
    GPU the allocator reuses memory of any size."""

    def __init__(self, axis: Axis, device: torch.device, computes_on: str) -> None:
        """computes_on: the type of `device`, or of the one that it stands for in a simulated run."""
        super().__init__(keep=2 if computes_on == "cpu" else 0)
        self.device, self._empty = device, partial(axis.empty, device=device)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat tensor."""
        buffer, last = self.lend(size, dtype, self._empty)
        if last is not None:
            last.settle()
        return buffer
