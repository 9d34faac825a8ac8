"""Extents in host memory. Invariant: an extent never moves, so a stream yields the extent itself. No
communication."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import TierError
from polyreme.files.direct_io import aligned
from polyreme.files.machine import boot
from polyreme.offload.copy_stream import CopyStream
from polyreme.offload.space import Allocation, Space
from polyreme.offload.store import Opened, Store, Then, add_when

ADDING = 2
"""Tensors that may be on their way to be added to extents."""


class HostStore(Store):
    """Extents of `device` in host memory, pinned where that is a GPU.

    `traffic` counts the extents that are used in place; copies to and from the device are their user's. of:
    what the extents are, for errors."""

    in_memory = True

    def __init__(
        self, device: torch.device | str = "cpu", copy_stream: CopyStream | None = None, of: str = ""
    ) -> None:
        # memory is freed only when no copy uses it
        extents, self._summands = (Space(self._take, lambda _: self.copy_stream.finish()) for _ in range(2))
        super().__init__([extents], 0, copy_stream)
        self._pin, self._of = torch.device(device).type == "cuda", f" for {of}" if of else ""
        # extents with an addition under way, and the function that does it
        self._adding: deque[tuple[int, Callable[[], None]]] = deque()
        # the last copy to each extent, and from it, that may be incomplete
        self._coming: dict[int, Any] = {}
        self._leaving: dict[int, Any] = {}

    @property
    def buffers(self) -> int:
        return self.taken + self._summands.nbytes

    def put(self, extent: int, data: Tensor, start: int = 0) -> bool:
        self._check_range(extent, start, start + data.nbytes)
        if data.device.type == "cpu":  # copies from a device are ordered by the copy stream
            self._wait(extent, to_change=True)
        memory = self.memory(extent)[start : start + data.nbytes]
        arrived = self.copy_stream.out(data.view(torch.uint8), memory)
        if arrived is not None:
            self._coming[extent] = arrived
        self.traffic.written += data.nbytes
        return arrived is None

    def get(self, extent: int, start: int, stop: int) -> Tensor:
        self._check_range(extent, start, stop)
        self._wait(extent)
        return self.memory(extent)[start:stop].clone()

    def add(
        self, extent: int, data: Tensor, dtype: torch.dtype, first: bool = False, then: Then | None = None
    ) -> bool:
        while len(self._adding) >= ADDING:
            self._adding.popleft()[1]()
        allocation = self._summands.take(data.nbytes)
        numbers = _memory(allocation)[: data.nbytes].view(data.dtype)
        arrived = self.copy_stream.out(data.view(torch.uint8), numbers.view(torch.uint8))

        def add() -> None:
            add_when(arrived, numbers, self.memory(extent), dtype, first, then)
            self._summands.free(allocation)

        self._adding.append((extent, add))
        self.traffic.written += data.nbytes
        return arrived is None

    def open(self, extent: int, read: bool = True, write: bool = False) -> Opened:
        if write:
            self._wait(extent, to_change=True)
        self.traffic.read += self.sizes[extent] if read else 0
        close = partial(self._let_go, extent, write)
        return Opened(self.memory(extent), lambda: True, partial(self._arriving, extent), close)

    def stream(self, order: Sequence[int], write: bool = True) -> Generator[Tensor, None, None]:
        for extent in order:
            self._wait(extent, to_change=write)
            self.traffic.read += self.sizes[extent]
            try:
                yield self.memory(extent)
            finally:
                self.traffic.written += self.sizes[extent] if write else 0

    def numbers(self, extent: int, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        self._wait(extent)
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory(extent)[start : start + size].view(dtype).view(*shape)

    def settle(self, extents: Iterable[int] | None = None) -> None:
        for extent in extents or [*self._coming, *(extent for extent, _ in self._adding)]:
            self._wait(extent)

    def close(self) -> None:
        super().close()
        self._summands.close()

    def memory(self, extent: int) -> Tensor:
        """Return the extent itself, without counting it as traffic."""
        return _memory(self._allocation(extent))[: self.sizes[extent]]

    def _arriving(self, extent: int) -> Any:
        """Wait until all additions to the extent are done. Returns the event of the last copy to it, if that
        is under way."""
        while self._is_busy(extent):
            self._adding.popleft()[1]()
        return self._coming.get(extent)

    def _let_go(self, extent: int, write: bool, after: Any) -> None:
        """Remember the event `after`, which ends a copy of the extent to the device, or with `write` from it:
        who writes to the extent, or reads it, waits for that."""
        self.traffic.written += self.sizes[extent] if write else 0
        if after is not None:
            (self._coming if write else self._leaving)[extent] = after

    def _wait(self, extent: int, to_change: bool = False) -> None:
        """Wait until the CPU can read the extent, or change it."""
        events = self._arriving(extent), self._leaving.pop(extent, None) if to_change else None
        self._coming.pop(extent, None)
        for event in events:
            if event is not None:
                event.synchronize()

    def _take(self, nbytes: int) -> Tensor:
        if (free := available()) is not None and nbytes > free:
            raise TierError(
                f"host memory: {nbytes:,} bytes needed{self._of}, {free:,} "
                "free. Use more hosts, or keep them in a folder"
            )
        # touch it, so that the system gives it now and not during training
        return aligned(nbytes, self._pin).zero_()

    def _is_busy(self, extent: int) -> bool:
        return any(each == extent for each, _ in self._adding)

    def _forget(self, extent: int) -> None:
        self._coming.pop(extent, None)
        self._leaving.pop(extent, None)
        super()._forget(extent)


def _memory(allocation: Allocation) -> Tensor:
    memory: Tensor = allocation.segment.backing
    return memory[allocation.start : allocation.stop]


def report_memory() -> dict[str, Any]:
    """Return this rank's report for `share`, as JSON can hold it."""
    return {"host": [socket.gethostname(), boot()], "free": available() or 0}


def share(reports: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes that this rank may take for a while: half of the free memory, divided among the ranks
    of this host. reports: the `report_memory` of all ranks."""
    mine = [socket.gethostname(), boot()]
    free = [each["free"] for each in reports if [*each["host"]] == mine]
    return int(min(free)) // 2 // len(free)


def refuse_more(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise TierError where ranks that share memory need more than there is: `needed` bytes each, of their
    `pools`."""
    for pool in dict.fromkeys(pool for each in reports for pool in each["pools"]):
        sharing = [each for each in reports if pool in each["pools"]]
        needed, free = sum(each["needed"] for each in sharing), min(each["pools"][pool] for each in sharing)
        if needed > free and len(sharing) > 1:
            raise TierError(
                f"host memory: {needed:,} bytes needed by {len(sharing)} ranks that share {free:,} free. "
                "Use more hosts, or keep them in a folder"
            )


def available() -> int | None:
    """Return the bytes of host memory that this process can have without swapping or being killed; None where
    nothing tells."""
    return min(pools().values(), default=None)


def pools() -> dict[str, int]:
    """Return the bytes of host memory available to this process from each pool that it may share: the
    system's free memory, and the rest of each control group's limit (of a container, or of a Slurm job)."""
    meminfo, machine = Path("/proc/meminfo"), boot() or socket.gethostname()
    free: dict[str, int] = {}
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            free[machine] = int(line.split()[1]) << 10
    groups = _left_by_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    # in each container the groups have other names
    container = Path("/proc/self/ns/cgroup").readlink() if groups else ""
    return free | {f"{machine} {container} {group}": left for group, left in groups.items()}


def total() -> int:
    """Return the bytes of host memory that this process could have if nothing else ran: the same at every
    start."""
    groups = _left_by_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), of_all=True)
    return min((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *groups.values()))


def _left_by_groups(membership: Path, root: Path, of_all: bool = False) -> dict[Path, int]:
    """Return the bytes that each control group with a limit around this process leaves it: versions 2 and 1
    (https://docs.kernel.org/admin-guide/cgroup-v2.html). Pages of files that were not used lately count as
    free. of_all: the limits themselves."""
    found: dict[Path, int] = {}
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, files = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
        group = top / path.lstrip("/")
        # a container may only see the top
        for each in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # no such group here; or "max": no limit
                limit, used = (int((each / name).read_text()) for name in files[:2])
                statistics = (each / "memory.stat").read_text().split()
                free = limit - used + int(statistics[statistics.index(files[2]) + 1])
                found[each] = limit if of_all else max(free, 0)
    return found


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
