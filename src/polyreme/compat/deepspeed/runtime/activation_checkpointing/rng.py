"""States of random generators that differ between the ranks that divide a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError

MODEL_PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Generators of the accelerator by name: each begins with a seed of its own, and goes on where it was
    left whenever it is forked."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Where each is."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Have each go on from there."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Begin one. Raises ArgumentError for a name or a seed that is there already."""
        if seed in self.seeds_ or name in self.states_:
            what = f"seed {seed}" if seed in self.seeds_ else f"cuda rng state {name}"
            raise ArgumentError(f"{what} already exists: give each generator a name and a seed of its own")
        self.seeds_.add(seed)
        before = get_accelerator().get_rng_state()
        get_accelerator().manual_seed(seed)
        self.states_[name] = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Random numbers inside are this one's. Raises ArgumentError for one that was not added."""
        if name not in self.states_:
            raise ArgumentError(f"cuda rng state {name} is not added: call add() or configure seeds first")
        before = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = get_accelerator().get_rng_state()
            get_accelerator().set_rng_state(before)
