"""Copies between a device and host memory that run beside the stream that computes.

Invariant: a copy begins when everything that was begun before it on the device is complete. No
communication."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def copy_stream_to(device: torch.device) -> CopyStream:
    """Return the copy stream between host memory and the device."""
    return CudaCopyStream(device) if device.type == "cuda" else CopyStream()


class CopyStream:
    """Copies on a CPU, done at once. `out` and `back` return None in place of an event."""

    def out(self, source: Tensor, memory: Tensor) -> Any:
        """Begin to copy `source`, on the device, to host `memory`. Returns an event for the end of the
        copy."""
        memory[: source.nbytes].copy_(source)

    def back(self, memory: Tensor, after: Any) -> tuple[Tensor, Any]:
        """Begin to copy host `memory`, after the event `after`, to a new tensor on the device. Returns the
        tensor, and an event for the end of the copy."""
        return memory.clone(), None

    def into(self, memory: Tensor, target: Tensor) -> Any:
        """Begin to copy host `memory` to `target`, of the same shape and dtype, on the device. Returns an
        event after which `memory` may be written to."""
        target.copy_(memory)

    def beside(self) -> AbstractContextManager[object]:
        """Context in which device work begins after the copies to the device, and not after the computation
        under way."""
        return nullcontext()

    def wait(self, event: Any) -> None:
        """Wait for a copy before it is used."""

    def arrive(self) -> None:
        """Wait for the copies of `into` before they are used."""

    def settle(self) -> None:
        """Free the sources of complete copies. Called now and then."""

    def finish(self) -> None:
        """Wait until nothing is being copied."""


class CudaCopyStream(CopyStream):
    """Copies of a GPU, on one stream in each direction, beside the one that computes. Memory is reused in the
    order of the streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._out, self._back = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: list[tuple[Tensor, torch.cuda.Event]] = []

    def out(self, source: Tensor, memory: Tensor) -> torch.cuda.Event:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        self._out.wait_stream(self._back)  # the back stream may still read the last contents of this memory
        with torch.cuda.stream(self._out):
            memory[: source.nbytes].copy_(source, non_blocking=True)
        event = self._out.record_event()
        self._leaving.append((source, event))
        return event

    def back(self, memory: Tensor, after: torch.cuda.Event | None) -> tuple[Tensor, torch.cuda.Event]:
        copy = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device)
        # the computation may still use the last contents of the copy's memory
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._back.wait_event(after)
        with torch.cuda.stream(self._back):
            copy.copy_(memory, non_blocking=True)
        copy.record_stream(self._back)
        return copy, self._back.record_event()

    def into(self, memory: Tensor, target: Tensor) -> torch.cuda.Event:
        # the computation may still read the last contents of the target
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            target.copy_(memory, non_blocking=True)
        return self._back.record_event()

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._back)

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def arrive(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._back)

    def settle(self) -> None:
        """Free the sources of copies since the last call: the stream that computes waits for these copies
        from here on."""
        for _, event in self._leaving:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._leaving.clear()

    def finish(self) -> None:
        self._out.synchronize()
        self._back.synchronize()
