"""Rounded parameters on their way from the CPU that updates to the device, while the update continues.

Invariant: memory is written again only when its last contents have arrived. No communication between
ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyreme.files.direct_io import aligned, padded
from polyreme.offload.copy_stream import CopyStream, copy_stream_to
from polyreme.optim.cpu_kernels import Workers

BACK = 2
"""Pieces of parameters that may be on their way to the device, beside those that are computed."""


def shares_cpu_memory(device: torch.device) -> bool:
    """Return whether the CPU that updates can use memory of `device` in place. The meta device stands for a
    CPU."""
    return device.type in ("cpu", "meta")


class HostTransfer:
    """The transfers to the device for all buckets of a rank with masters and states in a tier."""

    def __init__(self, device: torch.device) -> None:
        self.sent = 0
        """Bytes of parameters sent to the device."""
        self.memory = 0
        """Bytes of host memory that it takes."""
        self._pin = device.type == "cuda"
        self.copy_stream: CopyStream = copy_stream_to(device)
        self._back: deque[tuple[Any, Tensor]] = deque()  # the event after which each piece of memory is free
        self._pieces = 0  # how many pieces of memory there are

    @classmethod
    def over(cls, device: torch.device) -> HostTransfer | None:
        """Return the transfer to a device; None for a CPU, which has its parameters in place."""
        return None if shares_cpu_memory(device) else cls(device)

    def send(
        self, target: Tensor, fill: Callable[[Tensor], Callable[[], None] | None], workers: Workers
    ) -> None:
        """Fill host memory with the numbers of `target`, by `fill` and the work that it returns for a worker,
        and then begin to copy them there."""
        memory = self._next(target.nbytes, BACK + workers.most)
        numbers = memory[: target.nbytes].view(target.dtype).view(target.shape)
        self.sent += target.nbytes
        workers.do(fill(numbers), lambda: self._back.append((self.copy_stream.into(numbers, target), memory)))

    def arrive(self) -> None:
        """Wait for the parameters that were sent, before they are used."""
        self.copy_stream.arrive()

    def _next(self, nbytes: int, most: int) -> Tensor:
        """Return host memory of at least so many bytes."""
        event, memory = None, torch.empty(0)
        if self._pieces < most:
            self._pieces += 1
        else:
            event, memory = self._back.popleft()
        if event is not None:
            event.synchronize()
        if memory.nbytes < nbytes:
            self.memory += padded(nbytes) - memory.nbytes
            memory = aligned(padded(nbytes), self._pin)
        return memory
