"""Extents in host memory. Invariant: an extent never moves, so what a stream gives is the extent itself. No
communication."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import TierError
from polyreme.files.direct_io import aligned, padded
from polyreme.offload.store import Store


class HostStore(Store):
    """Extents of `device` in host memory, pinned where that is a GPU. `traffic` counts what is used of
    extents where they lie; whoever has to take it to the device, or from there, does that itself."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._pin = torch.device(device).type == "cuda"
        self._extents: list[Tensor] = []

    @property
    def buffers(self) -> int:
        return sum(padded(size) for size in self.sizes)

    def commit(self) -> None:
        if (free := available()) is not None and self.buffers > free:
            raise TierError(
                f"host memory: {self.buffers:,} bytes needed, {free:,} "
                "free. Use more hosts, or keep them in a folder"
            )
        # touched: taken here, and not when training is under way
        memory = aligned(self.buffers, self._pin).zero_()
        stops = accumulate(padded(size) for size in self.sizes)
        self._extents = [
            memory[stop - padded(size) :][:size] for size, stop in zip(self.sizes, stops, strict=True)
        ]

    def stream(
        self, order: Sequence[int], write: bool = True, read: bool = True
    ) -> Generator[Tensor, None, None]:
        for extent in order:
            self.traffic.read += self.sizes[extent] if read else 0
            try:
                yield self._extents[extent]
            finally:
                self.traffic.written += self.sizes[extent] if write else 0

    def read(self, extent: int, start: int, stop: int) -> Tensor:
        self.check_range(extent, start, stop)
        return self._extents[extent][start:stop].clone()

    def write(self, extent: int, start: int, data: Tensor) -> None:
        self.check_range(extent, start, start + data.nbytes)
        self._extents[extent][start : start + data.nbytes] = data.view(torch.uint8)

    def memory(self, extent: int) -> Tensor:
        """The extent itself, which does not count as traffic."""
        return self._extents[extent]

    def close(self) -> None:
        self._extents = []


def report_memory() -> dict[str, Any]:
    """What `share` asks of every rank, as JSON can hold it."""
    return {"host": socket.gethostname(), "free": available() or 0}


def share(reports: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that this rank may take for a while of what is free: half of it, divided among the ranks of this
    host. reports: all ranks' `report_memory`."""
    free = [each["free"] for each in reports if each["host"] == socket.gethostname()]
    return int(min(free)) // 2 // len(free)


def available() -> int | None:
    """Bytes of host memory that this process can have without swapping or being killed: what the system has,
    and what its control groups leave it (a container's limit, a job's of Slurm). None where neither tells."""
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.exists() else []
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return min((*free, *_left_by_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))), default=None)


def _left_by_groups(membership: Path, root: Path) -> Iterator[int]:
    """Bytes that each control group around this process leaves it, of those that have a limit: versions 2 and
    1 (https://docs.kernel.org/admin-guide/cgroup-v2.html). Pages of files that were not used lately count as
    free."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, files = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
        group = top / path.lstrip("/")
        # a container may see the top alone
        for each in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # no such group here; "max": no limit
                limit, used = (int((each / name).read_text()) for name in files[:2])
                statistics = (each / "memory.stat").read_text().split()
                yield max(limit - used + int(statistics[statistics.index(files[2]) + 1]), 0)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
