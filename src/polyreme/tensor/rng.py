"""Random numbers of tensor-parallel ranks: the same on all ranks where activations are replicated, different
where they are divided.

Invariant: outside of a fork the default generators of an axis's ranks are in the same state. The numbers
drawn in a fork depend on that state only, so that a recomputed forward, for which it is restored, draws the
same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis

STRIDE = 0x9E3779B97F4A7C15
"""The difference between the seeds of neighbouring ranks: odd and far from any simple ratio, so that no two
ranks have seeds close to each other."""


States = tuple[Tensor, Tensor | None]
"""The states of the default generators: the CPU's, and the GPU's (None without one)."""


def rng_states(device: torch.device) -> States:
    """Return the states of the default generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_rng_states(states: States, device: torch.device) -> None:
    """Set the default generators to `states`."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators, much faster than `torch.manual_seed`."""
    torch.default_generator.manual_seed(seed % (1 << 63))
    if device.type == "cuda":
        torch.cuda.manual_seed(seed % (1 << 63))


class Fork:
    """Switches the default generators from the state that the ranks share to one of this rank's own, and
    back."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._outside: tuple[States, torch.device] | None = None

    def enter(self, device: torch.device) -> None:
        """Switch to this rank's own state; a second call does nothing."""
        if self._outside is not None:
            return
        # the draw moves the shared state on
        seed = int(torch.randint(1 << 62, ())) + STRIDE * (self._axis.rank + 1)
        self._outside = rng_states(device), device
        seed_generators(seed, device)

    def leave(self) -> None:
        """Switch back to the shared state; does nothing without an `enter` before it."""
        if self._outside is None:
            return
        outside, self._outside = self._outside, None
        restore_rng_states(*outside)

    @contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        """Use this rank's own state inside of a `with` block."""
        self.enter(device)
        try:
            yield
        finally:
            self.leave()
