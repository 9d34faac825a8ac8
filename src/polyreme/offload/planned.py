"""The tier of a rank in a simulated run. Invariant: sizes and traffic are those of a real one; there are no
numbers. No memory, no files, no communication."""

from __future__ import annotations

import torch
from torch import Tensor

from polyreme.files.direct_io import padded
from polyreme.offload.host import HostStore


class PlannedStore(HostStore):
    """A tier in host memory, or in files with `buffers` in memory, without either: extents on the meta
    device."""

    def __init__(self, in_memory: bool = True, buffers: int = 0) -> None:
        super().__init__()
        self.in_memory, self._count = in_memory, buffers

    @property
    def buffers(self) -> int:
        return (
            super().buffers if self.in_memory else self._count * padded(max(self.sizes.values(), default=0))
        )

    def _take(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")
