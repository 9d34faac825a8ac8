"""Transfers between a device and the CPU that updates its buckets: reduced gradients there, in backward,
where those of several micro-batches may be added up; and rounded parameters back, while the update goes on.

Invariant: memory is written again only when what it held has arrived. No communication between ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.sums import sum_into
from polyreme.files.direct_io import aligned, padded
from polyreme.offload.copy_stream import CopyStream, copy_stream_to
from polyreme.offload.gradients import Final
from polyreme.offload.store import Traffic
from polyreme.optim.cpu_kernels import Workers

BACK = 2
"""Pieces of parameters that may be on their way back, beside those that are computed."""
ARRIVING = 2
"""Gradients that may be on their way to be added to others."""


class HostTransfer:
    """The transfers of all buckets of a rank whose masters and states are in a tier."""

    def __init__(self, device: torch.device) -> None:
        self.traffic = Traffic()
        """`written`: bytes of gradients that left the device; `read`: of parameters that came back to it."""
        self.memory = 0
        """Bytes of host memory that it takes."""
        self._pin = device.type == "cuda"
        self.copy_stream: CopyStream = copy_stream_to(device)
        self._back: deque[tuple[Any, Tensor]] = deque()  # when each piece of memory is free
        self._pieces = 0  # pieces of memory
        # when which gradient has arrived, and the memory that has it
        self._arriving: deque[tuple[HostGradients, Any, Tensor, Tensor]] = deque()
        self._free: list[Tensor] = []  # such memory

    @classmethod
    def over(cls, device: torch.device) -> HostTransfer | None:
        """None for a CPU, which has its gradients at hand."""
        return None if device.type == "cpu" else cls(device)

    def gradient_store(self, elements: int, dtype: torch.dtype, adds: bool = False) -> HostGradients:
        """Room for the gradients of one bucket, or for the sum of what it takes (`adds`)."""
        nbytes = elements * dtype.itemsize
        return HostGradients(self, self.take(nbytes)[:nbytes].view(dtype), adds)

    def take(self, nbytes: int) -> Tensor:
        """Host memory, of at least so many bytes."""
        self.memory += padded(nbytes)
        return aligned(padded(nbytes), self._pin)

    def leave(self, gradient: Tensor, memory: Tensor) -> Any:
        """Begin to copy a gradient, which is freed once it has left."""
        self.copy_stream.settle()
        self.traffic.written += gradient.nbytes
        return self.copy_stream.out(gradient.view(torch.uint8), memory.view(torch.uint8))

    def bring(self, gradient: Tensor, gradient_store: HostGradients) -> None:
        """Begin to copy a gradient, which is freed once it has left, to be added to what `gradient_store`
        has; those before the last ARRIVING are added now."""
        while len(self._arriving) >= ARRIVING:
            self._add_first()
        memory = self._fit(self._free.pop(), gradient.nbytes) if self._free else self.take(gradient.nbytes)
        numbers = memory[: gradient.nbytes].view(gradient.dtype)
        self._arriving.append((gradient_store, self.leave(gradient, numbers), numbers, memory))

    def add_all(self) -> None:
        """Return when all that is on its way is added to what it belongs to."""
        while self._arriving:
            self._add_first()

    def _add_first(self) -> None:
        gradient_store, arrived, numbers, memory = self._arriving.popleft()
        if arrived is not None:
            arrived.synchronize()
        gradient_store.add(numbers)
        self._free.append(memory)

    def send(
        self, target: Tensor, fill: Callable[[Tensor], Callable[[], None] | None], workers: Workers
    ) -> None:
        """Have `fill`, and what it returns for a worker to do, write the numbers of `target` to host memory,
        and then begin to copy them there."""
        memory = self._next(target.nbytes, BACK + workers.most)
        numbers = memory[: target.nbytes].view(target.dtype).view(target.shape)
        self.traffic.read += target.nbytes
        workers.do(fill(numbers), lambda: self._back.append((self.copy_stream.into(numbers, target), memory)))

    def arrive(self) -> None:
        """Wait for what was sent, before it is used."""
        self.copy_stream.arrive()

    def _next(self, nbytes: int, most: int) -> Tensor:
        if self._pieces < most:
            self._pieces += 1
            return self.take(nbytes)
        event, memory = self._back.popleft()
        if event is not None:
            event.synchronize()
        return self._fit(memory, nbytes)

    def _fit(self, memory: Tensor, nbytes: int) -> Tensor:
        """The memory, or more in its place."""
        if memory.nbytes >= nbytes:
            return memory
        self.memory -= memory.nbytes
        return self.take(nbytes)


class HostGradients:
    """A GradientStore, in `memory`."""

    order: Sequence[int] | None = None

    def __init__(self, transfer: HostTransfer, memory: Tensor, adds: bool) -> None:
        self.adds = adds
        self._transfer, self._memory = transfer, memory
        self._left: Any = None
        self._added = False  # whether the next one is added to it
        self._final: Final | None = None

    def put(self, gradient: Tensor, final: Final | None = None) -> bool:
        if self.adds:
            self._transfer.bring(gradient, self)
        else:
            self._left = self._transfer.leave(gradient, self._memory)
        self._final = final
        return False

    def add(self, gradient: Tensor) -> None:
        """Add what has arrived."""
        sum_into(self._memory, [gradient], accumulate=self._added)
        self._added = True

    def complete(self) -> None:
        if self.adds:
            self._transfer.add_all()
        elif self._left is not None:
            self._left.synchronize()
            self._left = None
        if self._final is not None:
            self._final(self._memory, 0)
            self._final = None

    def get(self) -> Tensor:
        self.complete()
        return self._memory

    def read(self, start: int, stop: int) -> Tensor:
        return self.get()[start:stop]

    def write(self, start: int, flat: Tensor) -> None:
        self.get()[start : start + flat.numel()].copy_(flat)

    def clear(self) -> None:
        self._transfer.add_all()
        self._transfer.copy_stream.settle()
        self._added, self._final = False, None
