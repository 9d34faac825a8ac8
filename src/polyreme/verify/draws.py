"""Which ranks draw the same random numbers in dropout, and which are to.

Invariant: ranks with other samples, and those with other parts of an activation, are to draw different
numbers; those that hold the same activation whole are to draw the same.
Communication: none."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.distributed.mesh import Mesh
from polyreme.models.patches import Patches
from polyreme.models.trace import watch
from polyreme.tensor.rng import rng_states
from polyreme.verify.reference import Exact
from polyreme.zero.parameter import in_backward

Drawn = dict[str, list[Any]]
"""By module: of each dropout in it, in their order, the shape that it drops of, and a digest of the state of
the generators."""


@contextmanager
def drawing(model: nn.Module, device: torch.device, into: Drawn, wide: bool) -> Iterator[None]:
    """Note the draws of the model's dropouts inside of the context, in which they drop. wide: see `Exact`."""
    inside, patches = [""], Patches()
    watch(model, lambda name, _: inside.append(name), lambda *_: inside.pop(), patches)

    def note(tensor: Tensor) -> None:
        if in_backward():
            return
        states = b"".join(s.cpu().numpy().tobytes() for s in rng_states(device) if s is not None)
        digest = hashlib.blake2b(states, digest_size=8)
        into.setdefault(inside[-1], []).append([list(tensor.shape), digest.hexdigest()])

    try:
        with Exact(wide, note):
            yield
    finally:
        patches.undo()


def differing(mesh: Mesh, found: Sequence[Mapping[str, list[Any]]], whole: Drawn) -> dict[str, str]:
    """Return, for each module with dropout, what is wrong with the ranks' draws, or "". found: by rank.
    whole: those of one micro-batch on one device."""
    notes = dict.fromkeys(whole, "")
    samples = [mesh.places(rank)["loss"] for rank in range(len(found))]
    for name, alone in whole.items():
        having = [rank for rank, drawn in enumerate(found) if drawn.get(name)]
        for rank in having:
            again = Counter(digest for _, digest in found[rank][name]).most_common(1)[0][1]
            if again > 1:
                notes[name] = f"rank {rank} draws the same numbers {again} times in a step"
        for one, other in itertools.combinations(having, 2):
            same = samples[one] == samples[other]
            pairs = zip(found[one][name], found[other][name], itertools.cycle(alone), strict=False)
            said = [what for drawn in pairs if (what := _wrong(*drawn, same))]
            if said:
                notes[name] = f"ranks {one} and {other} have {said[-1]}"
    return notes


def _wrong(one: list[Any], other: list[Any], alone: list[Any], same: bool) -> str:
    """Return what is wrong with the draws of two ranks, of the same samples or of others."""
    equal = one[1] == other[1]
    if same and one[0] == alone[0]:
        return "" if equal else "the same activation, but draw different numbers"
    what = "other parts of the activation (tp)" if same else "other samples (dp)"
    return f"{what}, but draw the same numbers" if equal else ""
