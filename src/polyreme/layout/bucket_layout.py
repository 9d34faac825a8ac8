"""Where every number of every tensor lives: named tensors packed into a flat buffer that is cut into one
shard per rank, and single tensors cut along a dimension over the ranks of tensor parallelism.

Invariant: the shards partition the buffer exactly, and every number of every tensor lies in exactly one shard
at one place. All arithmetic is in ranges; nothing assumes that a tensor, or the buffer, divides by the world
size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from polyreme.layout.intervals import Interval, ceil_div, gaps, overlap, round_up

ALIGN = 64
"""Slots and shards begin at multiples of this many elements, so that a vectorised elementwise kernel never
meets a tail inside them: the same number then goes through the same instructions wherever it lies, and
results are bitwise equal."""

Boundary = Literal["element", "tensor"]


def align(count: int) -> int:
    """`count` rounded up to a multiple of ALIGN."""
    return round_up(count, ALIGN)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to be placed: its name, shape, and the optimizer group (any small integer) that it belongs
    to."""

    name: str
    shape: tuple[int, ...]
    group: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """A tensor at its place: elements [start, stop) of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    group: int
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of the flattened tensor `name` lie at [offset, offset + stop - start) of a
    shard."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class GroupInterval:
    """A contiguous part [start, stop) of the flat buffer whose elements are all of one optimizer group.

    `slot` is given where it is exactly one whole tensor (boundary="tensor")."""

    group: int
    start: int
    stop: int
    slot: Slot | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """The placement of tensors in one flat buffer of `world` shards of `shard_size` elements each.

    boundary="element" cuts the buffer into equal shards wherever the cut falls (at most ALIGN-1 elements of
    padding behind each tensor); boundary="tensor" gives every tensor whole to one rank, for optimizers that
    need whole matrices."""

    slots: tuple[Slot, ...]
    shard_size: int
    world: int
    boundary: Boundary = "element"

    @classmethod
    def build(cls, tensors: Iterable[TensorSpec], world: int, boundary: Boundary = "element") -> BucketLayout:
        """Place `tensors` for `world` ranks. Tensors of a group lie together, otherwise in the order
        given."""
        specs = sorted(tensors, key=lambda t: t.group)
        if boundary == "element":
            slots, used = _pack(specs, 0)
            return cls(tuple(slots), align(ceil_div(used, world)), world, boundary)
        shares: list[list[TensorSpec]] = [[] for _ in range(world)]
        for spec in sorted(specs, key=lambda t: -t.size):  # largest first, to the least loaded rank
            min(shares, key=lambda share: sum(align(t.size) for t in share)).append(spec)
        shard_size = max(sum(align(t.size) for t in share) for share in shares)
        placed: list[Slot] = []
        for rank, share in enumerate(shares):
            placed += _pack(sorted(share, key=specs.index), rank * shard_size)[0]
        return cls(tuple(placed), shard_size, world, boundary)

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_size * self.world

    @cached_property
    def used(self) -> int:
        """Elements of the tensors alone, without padding."""
        return sum(slot.size for slot in self.slots)

    def shard(self, rank: int) -> tuple[int, int]:
        """The part [start, stop) of the buffer that is rank's shard."""
        return rank * self.shard_size, (rank + 1) * self.shard_size

    def ranges(self, rank: int) -> list[Range]:
        """What rank's shard holds of each tensor."""
        return self.within(*self.shard(rank))

    def within(self, low: int, high: int) -> list[Range]:
        """What the part [low, high) of the buffer holds of each tensor."""
        found = []
        for slot in self.slots:
            if inside := overlap(slot, Interval(low, high)):
                start, stop = inside
                found.append(Range(slot.name, start - slot.start, stop - slot.start, start - low))
        return found

    def gaps(self) -> list[Interval]:
        """The padding: parts of the buffer that belong to no tensor."""
        return gaps(((slot.start, slot.stop) for slot in self.slots), Interval(0, self.size))

    def group_intervals(self, start: int, stop: int) -> list[GroupInterval]:
        """The parts of [start, stop) of one group each; it covers whole shards. Padding belongs to the part
        before it (its values stay zero)."""
        part = Interval(start, stop)
        ordered = [s for s in sorted(self.slots, key=lambda s: s.start) if overlap(s, part)]
        if self.boundary == "tensor":
            return [GroupInterval(s.group, s.start, s.stop, s) for s in ordered]
        found: list[GroupInterval] = []
        for slot in ordered:
            low, high = overlap(Interval(slot.start, align(slot.stop)), part)
            if found and found[-1].group == slot.group and found[-1].stop == low:
                found[-1] = GroupInterval(slot.group, found[-1].start, high)
            else:
                found.append(GroupInterval(slot.group, low, high))
        return found


def _pack(specs: Sequence[TensorSpec], start: int) -> tuple[list[Slot], int]:
    """Slots for `specs` one behind the other from `start`, and where the next would begin."""
    slots = []
    for spec in specs:
        slots.append(Slot(spec.name, spec.shape, spec.group, start))
        start += align(spec.size)
    return slots, start


@dataclass(frozen=True)
class Cut:
    """How a whole tensor of `shape` is divided over ranks along `dim`: rank r holds the ranges `pieces[r]` of
    it, one behind the other, and zeros behind them up to `length`, so that every rank's tensor has the same
    shape. With `inner`, what that leaves is divided once more, along another dimension, over ranks of
    another axis: the ranks are then those of both axes, the last of which counts fastest.

    Ranks may hold the same numbers (a key-value head that several need); every number is held by one rank at
    least."""

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    length: int
    inner: Cut | None = None

    @classmethod
    def whole(cls, shape: Sequence[int], ways: int) -> Cut:
        """Every rank holds all of it."""
        length = shape[0] if len(shape) else 1
        return cls(tuple(shape), 0, (((0, length),),) * ways, length)

    @classmethod
    def packed(cls, shape: Sequence[int], dim: int, ways: int, sections: Sequence[tuple[int, int]]) -> Cut:
        """A cut of several sections one behind the other, each divided by itself: (elements, units that
        cannot be divided, such as heads).

        A section of fewer units than ranks is replicated by rule: `ways / units` neighbours hold the same
        unit. Raises ValueError where neither number divides the other."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ways)]
        start = 0
        for size, units in sections:
            if size % units or (units % ways and ways % units):
                raise ValueError(f"{units} units of {size} elements cannot be divided by {ways}")
            unit, each = size // units, max(units // ways, 1)
            for rank in range(ways):
                first = start + rank * units // ways * unit
                ranges[rank].append((first, first + each * unit))
            start += size
        pieces = tuple(tuple(held) for held in ranges)
        return cls(tuple(shape), dim, pieces, sum(stop - begin for begin, stop in pieces[0]))

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, ways: int) -> Cut:
        """Equal parts. Raises ValueError where `ways` does not divide the dimension."""
        size = shape[dim]
        if size % ways:
            raise ValueError(f"{size} elements cannot be divided by {ways}")
        return cls.packed(shape, dim, ways, [(size, ways)])

    @classmethod
    def padded(cls, shape: Sequence[int], dim: int, ways: int) -> Cut:
        """Parts that differ by one element at most; the shorter ones are padded. Raises ValueError for fewer
        elements than ranks."""
        size = shape[dim]
        if size < ways:
            raise ValueError(f"{size} elements cannot be divided by {ways}")
        bounds = [rank * size // ways for rank in range(ways + 1)]
        return cls(tuple(shape), dim, tuple(((a, b),) for a, b in pairwise(bounds)), ceil_div(size, ways))

    def then(self, inner: Cut) -> Cut:
        """This cut, and of what it leaves on each rank, `inner`. Raises ValueError where that is of another
        shape or along a dimension that is cut already."""
        taken = {cut.dim for cut, _ in self.along(0) if not cut.keeps}
        if inner.shape != self.local or not (inner.keeps or inner.dim not in taken):
            raise ValueError(f"a cut of {inner.shape} along {inner.dim} divides no {self.local} once more")
        return replace(self, inner=inner if self.inner is None else self.inner.then(inner))

    @property
    def ways(self) -> int:
        """How many ranks the tensor is divided over."""
        return len(self.pieces) * (self.inner.ways if self.inner else 1)

    @property
    def keeps(self) -> bool:
        """Whether this cut alone leaves every rank all of it."""
        return all(held == ((0, self.length),) for held in self.pieces) and self.shape[
            self.dim : self.dim + 1
        ] in ((self.length,), ())

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.keeps and (self.inner is None or self.inner.is_whole)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of each rank's tensor."""
        return self.inner.local if self.inner else self._left

    def along(self, rank: int) -> list[tuple[Cut, int]]:
        """The cuts of one dimension that it is made of, and the rank's place in each."""
        if self.inner is None:
            return [(self, rank)]
        outer, rest = divmod(rank, self.inner.ways)
        return [(self, outer), *self.inner.along(rest)]

    def used(self, rank: int) -> int:
        """Elements of the rank's tensor along `dim` that are not padding; of this cut alone."""
        return sum(stop - start for start, stop in self.pieces[rank])

    def owned(self, rank: int) -> list[tuple[int, int]]:
        """Ranges along `dim` of the rank's tensor that no rank before it holds, of this cut alone: what it
        counts in a sum over all ranks' numbers."""
        taken = {piece for held in self.pieces[:rank] for piece in held}
        found: list[tuple[int, int]] = []
        at = 0
        for piece in self.pieces[rank]:
            size = piece[1] - piece[0]
            if piece not in taken and found and found[-1][1] == at:
                found[-1] = (found[-1][0], at + size)
            elif piece not in taken:
                found.append((at, at + size))
            at += size
        return found

    def split(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's tensor, in memory of its own; `whole` itself where every rank holds all."""
        if self.is_whole:
            return whole
        for cut, place in self.along(rank):
            whole = cut._part(whole, place)
        return whole

    def put(self, local: Tensor, rank: int, whole: Tensor) -> Tensor:
        """Write the rank's numbers to their place in `whole`, without the padding; returns `whole`."""
        if not self.shape:
            return whole.copy_(local)
        outer, at = rank, 0
        if self.inner is not None:
            outer, rest = divmod(rank, self.inner.ways)
            local = self.inner.put(local, rest, self._part(whole, outer))
        for start, stop in self.pieces[outer]:
            whole.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, at, stop - start))
            at += stop - start
        return whole

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from every rank's in rank order."""
        whole = locals_[0].new_zeros(self.shape)
        for rank, local in enumerate(locals_):
            self.put(local, rank, whole)
        return whole

    @property
    def _left(self) -> tuple[int, ...]:
        """The shape of what this cut alone leaves on each rank."""
        if not self.shape:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def _part(self, whole: Tensor, rank: int) -> Tensor:
        """What this cut alone leaves on a rank, in memory of its own."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.pieces[rank]]
        if missing := self.length - self.used(rank):
            parts.append(whole.new_zeros((*self.shape[: self.dim], missing, *self.shape[self.dim + 1 :])))
        if len(parts) == 1:
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, self.dim)
