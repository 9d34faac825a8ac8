"""Records in host memory. Invariant: a record never moves, so what a stream gives is the record itself. No communication."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from polyreme.disk import aligned, padded
from polyreme.errors import TierError
from polyreme.tiers.tier import Tier


class HostTier(Tier):
    """Records of `device` in host memory, pinned where that is a GPU. `traffic` counts what is used of records where they lie; whoever has
    to take it to the device, or from there, does that itself."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._pin = torch.device(device).type == "cuda"
        self._records: list[Tensor] = []

    @property
    def buffers(self) -> int:
        return sum(padded(size) for size in self.sizes)

    def commit(self) -> None:
        if (free := available()) is not None and self.buffers > free:
            raise TierError(f"host memory: {self.buffers:,} bytes needed, {free:,} free. Use more hosts, or keep them in a folder")
        memory = aligned(self.buffers, self._pin).zero_()  # touched: taken here, and not when training is under way
        stops = accumulate(padded(size) for size in self.sizes)
        self._records = [memory[stop - padded(size) :][:size] for size, stop in zip(self.sizes, stops, strict=True)]

    def stream(self, order: Sequence[int], write: bool = True, read: bool = True) -> Generator[Tensor, None, None]:
        for record in order:
            self.traffic.read += self.sizes[record] if read else 0
            try:
                yield self._records[record]
            finally:
                self.traffic.written += self.sizes[record] if write else 0

    def read(self, record: int, start: int, stop: int) -> Tensor:
        self.check_range(record, start, stop)
        return self._records[record][start:stop].clone()

    def write(self, record: int, start: int, data: Tensor) -> None:
        self.check_range(record, start, start + data.nbytes)
        self._records[record][start : start + data.nbytes] = data.view(torch.uint8)

    def memory(self, record: int) -> Tensor:
        """The record itself, which does not count as traffic."""
        return self._records[record]

    def close(self) -> None:
        self._records = []


def available() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not tell."""
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
