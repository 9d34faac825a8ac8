"""Whose random numbers a model draws: on one rank torch's own, as without an engine; on several those of its
place on dp and pp, the same over tp.

Invariant: on several ranks a script's generators are where they were after each call of the engine. What a
forward draws there depends on the engine's seed, on torch's, on the step, and on how many forwards there were
since: on nothing that a checkpoint has not.
Communication: once, when it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Literal

import torch

from polyreme.distributed.mesh import Mesh
from polyreme.tensor.rng import generators, go_on_from, seed_generators

Kind = Literal["step", "forward", "look"]
NO_SEED = range(1 << 48, (1 << 64) - (1 << 48))
"""Where the seed of a process lies that has set none: any number of 64 bits, unlike those of scripts."""


class Randomness:
    """Random numbers of an engine's forwards. `seed`: that of the engine, the same on all ranks."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        """Take the script's seed; where it has set none, `seed` becomes the script's. Ranks of a tp or pp
        line whose generators differ go on with those of its first. All ranks must call."""
        device = self._device = mesh.device
        if torch.initial_seed() in NO_SEED:
            torch.manual_seed(seed)
        line, own = mesh.loss.rank, [each.tolist() for each in generators(device) if each is not None]
        told = mesh.aside().gather_objects((line, _digest(own)))
        first = {at: rank for rank, (at, _) in reversed([*enumerate(told)])}
        if any(told[first[at]][1] != digest for at, digest in told):
            given = mesh.aside().gather_objects(own if first[line] == mesh.rank else None)[first[line]]
            cpu, *cuda = [torch.tensor(each, dtype=torch.uint8, device="cpu") for each in given]
            go_on_from((cpu, cuda[0] if cuda else None), device)
        self.begin(mesh.aside().gather_objects(_peek())[0])
        self._place = mesh.loss.rank, mesh.pp.rank
        self._several, self._alone_in_line = mesh.world_size > 1, mesh.tp.size == 1

    def begin(self, seed: int) -> None:
        """Go on from a seed that an engine had between two steps."""
        self.seed, self._since, self._calls = seed, -1, Counter[str]()

    @contextmanager
    def inside(self, step: int, kind: Kind) -> Iterator[Callable[[], None]]:
        """What draws after `step` steps: the forwards and backwards of the next one, one forward of a loop's,
        or one that trains nothing. Calling what is yielded ends it."""
        if not self._several:
            yield lambda: None
            return
        outside = [generators(self._device)]
        seed_generators(self._next_seed(step, kind), self._device)

        def leave() -> None:
            if outside:
                go_on_from(outside.pop(), self._device)

        try:
            yield leave
        finally:
            leave()

    def _next_seed(self, step: int, kind: Kind) -> int:
        if step != self._since:
            self._since, self._calls = step, Counter()
        self._calls[kind] += kind != "step"  # which may be done again, to find what made a NaN
        # that of the script may be another on each rank, which tensor parallelism cannot bear
        script = torch.initial_seed() if self._alone_in_line else 0
        key = (self.seed, script, step, kind, self._calls[kind], *self._place)
        return int(_digest(key), 16)


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _peek() -> int:
    """The number that the script would draw next, which it still does."""
    generator = torch.Generator().set_state(torch.get_rng_state())
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))
