"""Randomness of tensor-parallel ranks: the same draws where activations are replicated, different ones where
they are divided.

Invariant: the default generators of an axis' ranks are in the same state outside of a fork. A fork's draws
depend on that state alone, so that a recomputed forward, for which it is restored, draws the same again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis

STRIDE = 0x9E3779B97F4A7C15
"""The distance of the seeds of neighbouring ranks: odd and far from any simple ratio, so that no rank's seeds
are near another's."""


States = tuple[Tensor, Tensor | None]
"""Of the default generators: the CPU's, and the GPU's where a device is one."""


def generators(device: torch.device) -> States:
    """Where the default generators are."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def go_on_from(states: States, device: torch.device) -> None:
    """Put the default generators where they were."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Have the default generators begin anew. `torch.manual_seed` takes much longer."""
    torch.default_generator.manual_seed(seed % (1 << 63))
    if device.type == "cuda":
        torch.cuda.manual_seed(seed % (1 << 63))


class Fork:
    """Takes the default generators from the state that the ranks share to one of this rank's own, and
    back."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._outside: tuple[States, torch.device] | None = None

    def enter(self, device: torch.device) -> None:
        """Let this rank draw for itself from here on; a second call does nothing."""
        if self._outside is not None:
            return
        # the draw moves the shared state on
        seed = int(torch.randint(1 << 62, ())) + STRIDE * (self._axis.rank + 1)
        self._outside = generators(device), device
        seed_generators(seed, device)

    def leave(self) -> None:
        """Go back to the shared state; without an `enter` before it, do nothing."""
        if self._outside is None:
            return
        outside, self._outside = self._outside, None
        go_on_from(*outside)

    @contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        """A fork for the time of a block."""
        self.enter(device)
        try:
            yield
        finally:
            self.leave()
