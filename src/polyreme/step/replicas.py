"""A check that what several ranks have copies of is still the same on all of them: parameters and masters
that data parallelism replicates, and those that tensor parallelism or tied pipeline stages do.

Invariant: all copies are compared once within `every` steps, an equal part in each step, the same part on all
ranks that have it. A difference raises the same error on every rank; where it is within rounding, and between
ranks that compute by themselves (tp, pp), there is one warning instead.
Communication: one number with the totals of a step. Where copies differ, checksums of all that the step
compared, and the numbers of those that do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import ModelError, named, ranks_named, warn
from polyreme.layout.bucket_layout import align
from polyreme.layout.intervals import Interval, ceil_div, overlap
from polyreme.placement.full_parameters import checksum
from polyreme.placement.placement import Placement
from polyreme.zero.bucket import Bucket

LEAST = 1 << 18
"""Fewest numbers that a step compares over an axis: fewer save nothing."""
PIECE = 1 << 20
"""Numbers gathered at a time where copies differ."""
BITS = 24


@dataclass(frozen=True, eq=False)
class Part:
    """Elements [start, stop) of a bucket's flat buffer, in whole lines of ALIGN: of the optimizer's copy, or
    of the whole parameters."""

    bucket: Bucket
    start: int
    stop: int
    masters: bool = True

    def cut(self, size: int) -> Iterator[Part]:
        """Yield parts of `size` elements at most."""
        for start in range(self.start, self.stop, size):
            yield Part(self.bucket, start, min(start + size, self.stop), self.masters)

    def numbers(self) -> Tensor:
        """Return the numbers, of this rank's own memory where they are in the device's."""
        bucket, first = self.bucket, self.bucket.region.start
        if not self.masters:
            return bucket.full[self.start : self.stop]
        if bucket.master is None:
            return bucket.read_masters(self.start, self.stop)
        return bucket.master[self.start - first : self.stop - first]


class Difference(NamedTuple):
    """A parameter whose copies differ over an axis: on the ranks `apart`, from those of the `others`; by how
    much at most, of numbers up to what size."""

    name: str
    axis: str
    apart: list[int]
    others: list[int]
    most: float
    size: float
    is_rounding: bool

    def __str__(self) -> str:
        return f"{self.name} (over {self.axis}: {ranks_named(self.apart)} from {ranks_named(self.others)})"


class Replicas:
    """The parameters of `placement` of which other ranks have copies, by the axis that these are on."""

    def __init__(self, placement: Placement, mesh: Mesh, every: int) -> None:
        self._mesh, self._steps, self._warned = mesh, 0, False
        found: dict[Axis, list[Part]] = defaultdict(list)
        self._exact = {mesh.loss, mesh.replicate}
        cuts = placement.division.parameters
        # tp first on every rank, so that no two ranks wait for each other
        for bucket in placement.buckets:
            tied = [] if bucket.tie is None else [bucket.tie]
            for slot in bucket.layout.slots:
                inside = overlap(Interval(slot.start, align(slot.stop)), bucket.region)
                for axis in [mesh.tp] * cuts[slot.name].cut.is_whole + tied if inside else ():
                    found[axis].append(Part(bucket, *inside))
        for bucket in placement.buckets:
            whole = bucket.residency.states == "full"
            if not bucket.sharded:
                kinds = (False, True) if bucket.has_copy and whole else (False,)
                found[mesh.loss] += [Part(bucket, 0, bucket.layout.size, masters) for masters in kinds]
            if bucket.sharded or (bucket.has_copy and not whole):
                found[mesh.replicate].append(Part(bucket, bucket.region.start, bucket.region.stop))
        self._turns = {axis: _turns(parts, every) for axis, parts in found.items() if axis.size > 1}

    @torch.no_grad()
    def digest(self) -> Tensor:
        """Return a whole number whose sum over all ranks is 0, and almost surely not 0 where copies that this
        step compares differ: a float64 scalar on the device, which is not waited for."""
        self._steps += 1
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for axis, parts in self._now():
            # 0 on a simulated rank, which is like all others, and takes the same memory as a real one
            factor = axis.size * axis.alone() - 1
            words = [part.numbers().view(torch.int64) for part in parts]
            if words:
                # the multiplication carries each bit of the checksum into the highest ones
                bits = checksum(torch.cat(words) if words[1:] else words[0]) * 0x1E3779B97F4A7C15 >> 64 - BITS
                total += (bits & (1 << BITS) - 1).to(total) * factor
        return total

    @torch.no_grad()
    def compare(self) -> None:
        """Raise ModelError for copies that this step compared and that differ. All ranks must call."""
        own = [each for axis, parts in self._now() for each in self._differences(axis, parts)]
        gathered: list[Any] = self._mesh.gather_objects(own)
        # each once, as several lines of ranks may have it
        found = [
            *{(each[0], each[1]): Difference(*each) for of_rank in gathered for each in of_rank}.values()
        ]
        grave = [each for each in found if not each.is_rounding]
        if grave:
            raise ModelError(_DIFFER.format(_told(grave)))
        if found and not self._warned:
            self._warned = True
            warn(_ROUNDING.format(_told(found)))

    def _now(self) -> Iterator[tuple[Axis, list[Part]]]:
        """Yield the axes and what this step compares over each, without what `Engine.sleep` has moved."""
        for axis, turns in self._turns.items():
            parts = turns[self._steps % len(turns)] if turns else []
            yield axis, [part for part in parts if not {"params", "masters"} & part.bucket.asleep.keys()]

    def _differences(self, axis: Axis, parts: Sequence[Part]) -> Iterator[Difference]:
        places = [
            (slot.name, part, inside.since(part.start))
            for part in parts
            for slot in part.bucket.layout.slots
            if (inside := overlap(Interval(slot.start, align(slot.stop)), part))
        ]
        own = [int(checksum(part.numbers()[place])) for _, part, place in places]
        gathered: list[Any] = axis.gather_objects([self._mesh.rank, own])
        for at, (name, part, place) in enumerate(places):
            alike: dict[int, list[int]] = defaultdict(list)
            for rank, sums in gathered:
                alike[sums[at]].append(rank)
            if len(alike) > 1:
                others, *apart = sorted(alike.values(), key=len, reverse=True)
                numbers = part.numbers()[place]
                most, size = _difference(axis, numbers)
                computed = axis not in self._exact
                is_rounding = computed and most <= size * torch.finfo(numbers.dtype).eps ** 0.5
                yield Difference(name, axis.name, sorted(chain(*apart)), others, most, size, is_rounding)


def _turns(parts: Sequence[Part], every: int) -> list[list[Part]]:
    """Return the parts, cut and shared out over `every` steps at most."""
    size = align(max(LEAST, ceil_div(sum(part.stop - part.start for part in parts), every)))
    turns: list[list[Part]] = []
    room = 0
    for part in (piece for each in parts for piece in each.cut(size)):
        if room <= 0:
            turns.append([])
            room = size
        turns[-1].append(part)
        room -= part.stop - part.start
    return turns


def _difference(axis: Axis, numbers: Tensor) -> tuple[float, float]:
    """Return the largest difference between ranks, and the largest number. All ranks of the axis must
    call."""
    found = []
    for piece in numbers.split(PIECE):
        each = piece.new_empty(axis.size, len(piece))
        axis.all_gather(each.view(-1), piece).wait()
        found.append(torch.stack([(each - each[0]).abs().max(), each.abs().max()]))
    largest, size = torch.stack(found).amax(0).tolist()  # NaN where one is
    return largest, size


def _told(found: Sequence[Difference]) -> str:
    first, more = found[0], f"; {named(found[1:])}, too" if found[1:] else ""
    return f"{first}, by up to {first.most:g}, of numbers up to {first.size:g}{more}"


_DIFFER = (
    "a parameter has not the same numbers any more on every rank that has a copy of it: {}. If it was "
    "written to between steps: write the same on all ranks, or inside "
    "`with engine.full_parameters(write=True):`, where one rank's count. If not, these ranks do not compute "
    "alike: look for what depends on the rank, such as a hook or random numbers of another generator. Where "
    "there is none, a number was damaged in a rank's memory: go on from the last checkpoint"
)
_ROUNDING = (
    "copies of a parameter on several ranks differ in their last digits: {}. Ranks of unlike processors, or "
    "operations whose order is not fixed, round otherwise; where there are none, look for what depends on "
    "the rank. The run goes on, and this is said once"
)
