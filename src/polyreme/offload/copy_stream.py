"""Copies between a device and host memory that go on beside the stream that computes.

Invariant: a copy begins when all that was begun before it on the device is complete. No communication.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def copy_stream_to(device: torch.device) -> CopyStream:
    """The way between host memory and the device."""
    return CudaCopyStream(device) if device.type == "cuda" else CopyStream()


class CopyStream:
    """Copies of a CPU, done at once. What out and back return in place of an event is None."""

    def out(self, source: Tensor, memory: Tensor) -> Any:
        """Begin to copy `source` to memory; returns when it is complete."""
        memory[: source.nbytes].copy_(source)

    def back(self, memory: Tensor, after: Any) -> tuple[Tensor, Any]:
        """Begin to copy memory, once `after` has come, to a new tensor; returns it, and when that is
        complete."""
        return memory.clone(), None

    def into(self, memory: Tensor, target: Tensor) -> Any:
        """Begin to copy memory to `target`, of the same shape and dtype; returns when memory is free."""
        target.copy_(memory)

    def beside(self) -> AbstractContextManager[object]:
        """What is begun inside begins after the copies to the device, and not after what is being
        computed."""
        return nullcontext()

    def wait(self, event: Any) -> None:
        """Wait for a copy before it is used."""

    def arrive(self) -> None:
        """Wait for what `into` copied, before it is used."""

    def returned(self) -> Any:
        """An event that comes when all copies that have begun so far have left their memory."""

    def settle(self) -> None:
        """Let go of sources that were copied; called now and then."""

    def finish(self) -> None:
        """Return when nothing is being copied."""


class CudaCopyStream(CopyStream):
    """Copies of a GPU, on a stream in each direction, beside the one that computes. Memory is used again in
    the order of the streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._out, self._back = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: list[tuple[Tensor, torch.cuda.Event]] = []

    def out(self, source: Tensor, memory: Tensor) -> torch.cuda.Event:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        self._out.wait_stream(self._back)  # it may still read what this memory had before
        with torch.cuda.stream(self._out):
            memory[: source.nbytes].copy_(source, non_blocking=True)
        event = self._out.record_event()
        self._leaving.append((source, event))
        return event

    def back(self, memory: Tensor, after: torch.cuda.Event | None) -> tuple[Tensor, torch.cuda.Event]:
        copy = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device)
        # which may still use what the copy's memory had before
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._back.wait_event(after)
        with torch.cuda.stream(self._back):
            copy.copy_(memory, non_blocking=True)
        copy.record_stream(self._back)
        return copy, self._back.record_event()

    def into(self, memory: Tensor, target: Tensor) -> torch.cuda.Event:
        # which may still read what the target had before
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

    def returned(self) -> torch.cuda.Event:
        return self._back.record_event()

    def settle(self) -> None:
        """The sources that left since the last time are freed: from here on the stream that computes waits
        for them to have left."""
        for _, event in self._leaving:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._leaving.clear()

    def finish(self) -> None:
        self._out.synchronize()
        self._back.synchronize()
