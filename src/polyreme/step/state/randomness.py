"""Random numbers of a model's forwards: on one rank torch's own, as without an engine; on several, those of
the rank's place on dp and pp, the same over tp.

Invariant: on several ranks, each call of the engine leaves a script's generators as they were. A forward's
numbers depend only on the engine's seed, on torch's, on the step, and on how many forwards there were since:
all of which a checkpoint has.
Communication: once, when it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Literal

import torch

from polyreme.distributed.mesh import Mesh
from polyreme.tensor.rng import restore_rng_states, rng_states, seed_generators

RandomUse = Literal["step", "forward", "look"]
NO_SEED = range(1 << 48, (1 << 64) - (1 << 48))
"""The range of initial seeds of a process that has set none: any 64-bit number that a script is unlikely to
choose."""


class Randomness:
    """Random numbers of an engine's forwards. `seed`: of the engine, the same on all ranks."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        """Take the script's seed; where it has set none, `seed` becomes the script's. Ranks of a tp or pp
        line whose generators differ take those of the line's first rank. All ranks must call."""
        device = self._device = mesh.device
        if torch.initial_seed() in NO_SEED:
            torch.manual_seed(seed)
        line, own = mesh.loss.rank, [each.tolist() for each in rng_states(device) if each is not None]
        gathered = mesh.control_axis().gather_objects((line, _digest(own)))
        first = {at: rank for rank, (at, _) in reversed([*enumerate(gathered)])}
        if any(gathered[first[at]][1] != digest for at, digest in gathered):
            given = mesh.control_axis().gather_objects(own if first[line] == mesh.rank else None)[first[line]]
            cpu, *cuda = [torch.tensor(each, dtype=torch.uint8, device="cpu") for each in given]
            restore_rng_states((cpu, cuda[0] if cuda else None), device)
        self.begin(mesh.control_axis().gather_objects(_peek())[0])
        self._place = mesh.loss.rank, mesh.pp.rank
        self._several, self._alone_in_line = mesh.world_size > 1, mesh.tp.size == 1

    def begin(self, seed: int) -> None:
        """Derive the random numbers of coming steps from `seed`, which an engine had between two steps, such
        as one in a checkpoint."""
        self.seed, self._since, self._calls = seed, -1, Counter[str]()

    @contextmanager
    def inside(self, step: int, use: RandomUse) -> Iterator[Callable[[], None]]:
        """Seed the generators for random numbers after `step` steps: for the forwards and backwards of the
        next one ("step"), one forward of a user's loop ("forward"), or one without training ("look"). Calling
        the yielded function ends it early."""
        if not self._several:
            yield lambda: None
            return
        outside = [rng_states(self._device)]
        seed_generators(self._next_seed(step, use), self._device)

        def leave() -> None:
            if outside:
                restore_rng_states(outside.pop(), self._device)

        try:
            yield leave
        finally:
            leave()

    def _next_seed(self, step: int, use: RandomUse) -> int:
        if step != self._since:
            self._since, self._calls = step, Counter()
        self._calls[use] += use != "step"  # a step may be repeated, to find the origin of a NaN
        # tensor parallelism needs one seed on all its ranks, and the script's may differ
        script = torch.initial_seed() if self._alone_in_line else 0
        key = (self.seed, script, step, use, self._calls[use], *self._place)
        return int(_digest(key), 16)


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _peek() -> int:
    """Return the number that the script would draw next, without drawing it."""
    generator = torch.Generator().set_state(torch.get_rng_state())
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))
