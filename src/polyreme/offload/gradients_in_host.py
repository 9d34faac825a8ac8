"""What goes between a device and the CPU that updates its buckets: reduced gradients there, in backward, where those of several
micro-batches may be added up; and rounded parameters back, while the update goes on.

Invariant: memory is written again only when what it held has arrived. No communication between ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.gloo_direct import sum_into
from polyreme.files.direct_io import aligned, padded
from polyreme.offload.copy_stream import Lane, lane_to
from polyreme.offload.gradients import Final
from polyreme.offload.store import Traffic
from polyreme.optim.cpu_kernels import Crew

BACK = 2
"""Pieces of parameters that may be on their way back, beside those that are computed."""
ARRIVING = 2
"""Gradients that may be on their way to be added to others."""


class Ferry:
    """Of all buckets of a rank whose masters and states are in a tier."""

    def __init__(self, device: torch.device) -> None:
        self.traffic = Traffic()
        """`written`: bytes of gradients that left the device; `read`: of parameters that came back to it."""
        self.memory = 0
        """Bytes of host memory that it takes."""
        self._pin = device.type == "cuda"
        self.lane: Lane = lane_to(device)
        self._back: deque[tuple[Any, Tensor]] = deque()  # when each piece of memory is free
        self._pieces = 0  # of memory
        self._arriving: deque[tuple[HostHold, Any, Tensor, Tensor]] = deque()  # when which gradient has arrived, and the memory that has it
        self._free: list[Tensor] = []  # such memory

    @classmethod
    def over(cls, device: torch.device) -> Ferry | None:
        """None for a CPU, which has its gradients at hand."""
        return None if device.type == "cpu" else cls(device)

    def hold(self, elements: int, dtype: torch.dtype, adds: bool = False) -> HostHold:
        """Room for the gradients of one bucket, or for the sum of what it takes (`adds`)."""
        nbytes = elements * dtype.itemsize
        return HostHold(self, self.take(nbytes)[:nbytes].view(dtype), adds)

    def take(self, nbytes: int) -> Tensor:
        """Host memory, of at least so many bytes."""
        self.memory += padded(nbytes)
        return aligned(padded(nbytes), self._pin)

    def leave(self, gradient: Tensor, memory: Tensor) -> Any:
        """Begin to copy a gradient, which is freed once it has left."""
        self.lane.settle()
        self.traffic.written += gradient.nbytes
        return self.lane.out(gradient.view(torch.uint8), memory.view(torch.uint8))

    def bring(self, gradient: Tensor, hold: HostHold) -> None:
        """Begin to copy a gradient, which is freed once it has left, to be added to what `hold` has; those before the last ARRIVING are
        added now."""
        while len(self._arriving) >= ARRIVING:
            self._add_first()
        memory = self._fit(self._free.pop(), gradient.nbytes) if self._free else self.take(gradient.nbytes)
        numbers = memory[: gradient.nbytes].view(gradient.dtype)
        self._arriving.append((hold, self.leave(gradient, numbers), numbers, memory))

    def add_all(self) -> None:
        """Return when all that is on its way is added to what it belongs to."""
        while self._arriving:
            self._add_first()

    def _add_first(self) -> None:
        hold, arrived, numbers, memory = self._arriving.popleft()
        if arrived is not None:
            arrived.synchronize()
        hold.add(numbers)
        self._free.append(memory)

    def send(self, target: Tensor, fill: Callable[[Tensor], Callable[[], None] | None], crew: Crew) -> None:
        """Have `fill`, and what it returns for one of the crew to do, write the numbers of `target` to host memory, and then begin to copy
        them there."""
        memory = self._next(target.nbytes, BACK + crew.most)
        numbers = memory[: target.nbytes].view(target.dtype).view(target.shape)
        self.traffic.read += target.nbytes
        crew.do(fill(numbers), lambda: self._back.append((self.lane.into(numbers, target), memory)))

    def arrive(self) -> None:
        """Before what was sent is used."""
        self.lane.arrive()

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


class HostHold:
    """A Hold, in `memory`."""

    order: Sequence[int] | None = None

    def __init__(self, ferry: Ferry, memory: Tensor, adds: bool) -> None:
        self.adds = adds
        self._ferry, self._memory = ferry, memory
        self._left: Any = None
        self._holds = False  # what the next one is to be added to
        self._final: Final | None = None

    def take(self, gradient: Tensor, final: Final | None = None) -> bool:
        if self.adds:
            self._ferry.bring(gradient, self)
        else:
            self._left = self._ferry.leave(gradient, self._memory)
        self._final = final
        return False

    def add(self, gradient: Tensor) -> None:
        """Add what has arrived."""
        sum_into(self._memory, [gradient], accumulate=self._holds)
        self._holds = True

    def complete(self) -> None:
        if self.adds:
            self._ferry.add_all()
        elif self._left is not None:
            self._left.synchronize()
            self._left = None
        if self._final is not None:
            self._final(self._memory, 0)
            self._final = None

    def numbers(self) -> Tensor:
        self.complete()
        return self._memory

    def clear(self) -> None:
        self._ferry.add_all()
        self._ferry.lane.settle()
        self._holds, self._final = False, None
