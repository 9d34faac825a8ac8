"""Whether the copies of parameters that several ranks have, over tensor parallelism or because stages of a
pipeline share them, still have the same numbers. (Of those over data parallelism see
`placement.full_parameters`.)

Invariant: all ranks look at the same steps: the first ones, and then every `EVERY`-th. A difference of more
than rounding raises the same error on every rank.
Communication: one number with the totals of a step; where copies differ, digests of all of them, and the
numbers of those that do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import ModelError, named
from polyreme.layout.bucket_layout import Slot
from polyreme.layout.intervals import overlap
from polyreme.placement.placement import Placement
from polyreme.zero.bucket import Bucket

FIRST, EVERY = 3, 100
"""Steps that look at the numbers with which they began."""
PIECE = 1 << 20
"""Numbers looked at together."""
SHOWN = 5
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BITS = 24

Copies = list[tuple[Bucket, Slot]]


def looks(step: int) -> bool:
    """Whether this step, counted from 1, is one of those that look."""
    return step <= FIRST or step % EVERY == 0


class Replicas:
    """The trained parameters of `placement` of which other ranks have copies."""

    def __init__(self, placement: Placement, mesh: Mesh) -> None:
        self._mesh, self._steps = mesh, 0
        division = placement.division
        over_tp = [
            (bucket, slot)
            for bucket in placement.trainable
            for slot in bucket.layout.slots
            if division.shardings[slot.name].cut.is_whole
        ]
        tied: dict[Axis, Copies] = defaultdict(list)
        for bucket in placement.trainable:
            if bucket.tie is not None:
                tied[bucket.tie] += [(bucket, slot) for slot in bucket.layout.slots]
        # first over tp, so that no two ranks wait for each other
        self._copies = [*([(mesh.tp, over_tp)] if mesh.tp.size > 1 else []), *tied.items()]

    @torch.no_grad()
    def digest(self) -> Tensor:
        """A whole number whose sum over all ranks is 0, and almost surely nothing else where copies differ: a
        float64 scalar on the device, which is not waited for. 0 in a step that does not look."""
        self._steps += 1
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if looks(self._steps):
            for axis, copies in self._copies:
                digests = [_digest(bucket, slot) for bucket, slot in copies]
                if digests:
                    total += _bits(torch.stack(digests)).double() * (axis.size - 1 if axis.rank == 0 else -1)
        return total

    @torch.no_grad()
    def compare(self) -> None:
        """Raise ModelError for copies that differ by more than rounding. All ranks must call."""
        found: list[tuple[str, float, float]] = []
        for axis, copies in self._copies:
            told: list[Any] = axis.gather_objects([int(_digest(bucket, slot)) for bucket, slot in copies])
            differing = [
                each for each, digests in zip(copies, zip(*told, strict=True), strict=True)
                if len({*digests}) > 1
            ]  # fmt: skip
            for bucket, slot in differing:
                largest, size = _difference(axis, bucket, slot)
                if not largest <= size * torch.finfo(bucket.formats.master).eps ** 0.5:
                    found.append((slot.name, largest, size))
        everyone: list[Any] = self._mesh.gather_objects(found)
        by_name: dict[str, tuple[float, float]] = {}
        for name, largest, size in (each for reports in everyone for each in reports):
            by_name[name] = max(by_name.get(name, (0.0, 0.0)), (largest, size))
        if by_name:
            lines = [
                f"{name} (by {most:g}, of numbers up to {size:g})" for name, (most, size) in by_name.items()
            ]
            raise ModelError(_DIFFER.format(named(lines, SHOWN)))


def _pieces(bucket: Bucket, slot: Slot) -> Iterator[tuple[int, Tensor]]:
    """What this rank has of a parameter's masters, from which place of the bucket on."""
    here = overlap(slot, bucket.region)
    for start in range(here.start, here.stop, PIECE) if here else ():
        yield start, bucket.part(start, min(start + PIECE, here.stop))


def _digest(bucket: Bucket, slot: Slot) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bucket.device)
    for start, numbers in _pieces(bucket, slot):
        words = numbers.view(WORDS[numbers.element_size()]).long()
        places = torch.arange(start, start + len(words), device=words.device)
        total += (words * (2 * places + 1)).sum()
    return _bits(total)


def _bits(numbers: Tensor) -> Tensor:
    """Whole numbers below 2^BITS, of which each depends on all bits of one of `numbers`; or of several."""
    places = torch.arange(1, 2 * numbers.numel(), 2, device=numbers.device)
    return ((numbers.reshape(-1) * places).sum() * 0x1E3779B97F4A7C15 >> (64 - BITS)) & ((1 << BITS) - 1)


def _difference(axis: Axis, bucket: Bucket, slot: Slot) -> tuple[float, float]:
    """The largest difference between ranks, and the largest number. All ranks of the axis must call."""
    largest = size = 0.0
    for _, numbers in _pieces(bucket, slot):
        each = numbers.new_empty(axis.size, len(numbers))
        axis.all_gather(each.view(-1), numbers).wait()
        largest = max(largest, float((each - each[0]).abs().max()))
        size = max(size, float(each.abs().max()))
    return largest, size


_DIFFER = (
    "ranks that have copies of a parameter (mesh.tp, or tied over mesh.pp) have not the same numbers any "
    "more: {0}. If it was written to between steps: write the same on all ranks, or inside "
    "`with engine.full_parameters(write=True):`, where one rank's count. If not, these ranks do not compute "
    "alike: look for what depends on the rank, such as a hook or random numbers of another generator"
)
