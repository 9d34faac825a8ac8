"""Where every number of every tensor lies: named tensors packed into a flat buffer that is cut into one shard
per rank, and single tensors cut along a dimension over the ranks of tensor parallelism.

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
    """Return `count` rounded up to a multiple of ALIGN."""
    return round_up(count, ALIGN)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be placed: its name, shape, and optimizer group (any small integer)."""

    name: str
    shape: tuple[int, ...]
    group: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor: elements [start, stop) of the flat buffer."""

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
    """Elements [start, stop) of the flattened tensor `name`, which lie at [offset, offset + stop - start) of
    a shard."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class GroupInterval:
    """A range [start, stop) of the flat buffer whose elements belong to one optimizer group.

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
        """The elements of the whole buffer, with padding."""
        return self.shard_size * self.world

    @cached_property
    def used(self) -> int:
        """The elements of the tensors, without padding."""
        return sum(slot.size for slot in self.slots)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the range [start, stop) of the buffer that is the rank's shard."""
        return rank * self.shard_size, (rank + 1) * self.shard_size

    def ranges(self, rank: int) -> list[Range]:
        """Return the ranges of tensors that lie in the rank's shard."""
        return self.within(*self.shard(rank))

    def within(self, low: int, high: int) -> list[Range]:
        """Return the ranges of tensors that lie in elements [low, high) of the buffer."""
        found = []
        for slot in self.slots:
            if inside := overlap(slot, Interval(low, high)):
                start, stop = inside
                found.append(Range(slot.name, start - slot.start, stop - slot.start, start - low))
        return found

    def gaps(self) -> list[Interval]:
        """Return the padding: the intervals of the buffer that belong to no tensor."""
        return gaps(((slot.start, slot.stop) for slot in self.slots), Interval(0, self.size))

    def group_intervals(self, start: int, stop: int) -> list[GroupInterval]:
        """Cut [start, stop), which covers whole shards, into intervals of one group each. Padding belongs to
        the interval before it (its values stay zero)."""
        within = Interval(start, stop)
        ordered = [s for s in sorted(self.slots, key=lambda s: s.start) if overlap(s, within)]
        if self.boundary == "tensor":
            return [GroupInterval(s.group, s.start, s.stop, s) for s in ordered]
        found: list[GroupInterval] = []
        for slot in ordered:
            low, high = overlap(Interval(slot.start, align(slot.stop)), within)
            if found and found[-1].group == slot.group and found[-1].stop == low:
                found[-1] = GroupInterval(slot.group, found[-1].start, high)
            else:
                found.append(GroupInterval(slot.group, low, high))
        return found


def _pack(specs: Sequence[TensorSpec], start: int) -> tuple[list[Slot], int]:
    """Place `specs` one after the other from `start`. Returns their slots, and where the next would begin."""
    slots = []
    for spec in specs:
        slots.append(Slot(spec.name, spec.shape, spec.group, start))
        start += align(spec.size)
    return slots, start


@dataclass(frozen=True)
class Cut:
    """A division of a tensor of `shape` over ranks along `dim`. Rank r holds the ranges `pieces[r]` of it,
    one after the other, and zeros after them up to `length`, so that every rank's tensor has the same shape.
    With `inner`, each rank's tensor is divided once more, along another dimension, over ranks of another
    axis: the ranks are then those of both axes, the last of which counts fastest.

    Several ranks may hold the same numbers (a key-value head that they all need); every number is held by at
    least one rank."""

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    length: int
    inner: Cut | None = None

    @classmethod
    def whole(cls, shape: Sequence[int], ways: int) -> Cut:
        """Return the cut by which each of `ways` ranks holds the whole tensor."""
        length = shape[0] if len(shape) else 1
        return cls(tuple(shape), 0, (((0, length),),) * ways, length)

    @classmethod
    def packed(cls, shape: Sequence[int], dim: int, ways: int, sections: Sequence[tuple[int, int]]) -> Cut:
        """Return a cut of consecutive sections, each divided by itself. A section is (elements, units that
        cannot be divided, such as heads).

        A section of fewer units than ranks is replicated: `ways / units` neighbours hold the same unit.
        Raises ValueError where neither number divides the other."""
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
        """Return a cut into equal ranges. Raises ValueError where `ways` does not divide the dimension."""
        size = shape[dim]
        if size % ways:
            raise ValueError(f"{size} elements cannot be divided by {ways}")
        return cls.packed(shape, dim, ways, [(size, ways)])

    @classmethod
    def padded(cls, shape: Sequence[int], dim: int, ways: int) -> Cut:
        """Return a cut into ranges that differ by at most one element; shorter ones are padded. Raises
        ValueError for fewer elements than ranks."""
        size = shape[dim]
        if size < ways:
            raise ValueError(f"{size} elements cannot be divided by {ways}")
        bounds = [rank * size // ways for rank in range(ways + 1)]
        return cls(tuple(shape), dim, tuple(((a, b),) for a, b in pairwise(bounds)), ceil_div(size, ways))

    def then(self, inner: Cut) -> Cut:
        """Return this cut followed by `inner`, which divides each rank's tensor further. Raises ValueError
        where `inner` has another shape or a dimension that is cut already."""
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
        """Whether this cut, without `inner`, leaves every rank the whole tensor."""
        return all(held == ((0, self.length),) for held in self.pieces) and self.shape[
            self.dim : self.dim + 1
        ] in ((self.length,), ())

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.keeps and (self.inner is None or self.inner.is_whole)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of each rank's tensor."""
        return self.inner.local if self.inner else self._left

    def along(self, rank: int) -> list[tuple[Cut, int]]:
        """Return this cut and its inner ones, each with the rank's place in it."""
        if self.inner is None:
            return [(self, rank)]
        outer, rest = divmod(rank, self.inner.ways)
        return [(self, outer), *self.inner.along(rest)]

    def used(self, rank: int) -> int:
        """Return the elements of the rank's tensor along `dim` that are not padding; `inner` does not
        count."""
        return sum(stop - start for start, stop in self.pieces[rank])

    def owned(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges along `dim` of the rank's tensor that no rank before it holds, so that a sum over
        all ranks counts each number once; `inner` does not count."""
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
        """Return the rank's tensor, in memory of its own; or `whole` itself where every rank holds all of
        it."""
        if self.is_whole:
            return whole
        for cut, place in self.along(rank):
            whole = cut._local_tensor(whole, place)
        return whole

    def put(self, local: Tensor, rank: int, whole: Tensor) -> Tensor:
        """Write the rank's numbers to their place in `whole`, without the padding. Returns `whole`."""
        if not self.shape:
            return whole.copy_(local)
        outer, at = rank, 0
        if self.inner is not None:
            outer, rest = divmod(rank, self.inner.ways)
            local = self.inner.put(local, rest, self._local_tensor(whole, outer))
        for start, stop in self.pieces[outer]:
            whole.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, at, stop - start))
            at += stop - start
        return whole

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, from every rank's in rank order."""
        whole = locals_[0].new_zeros(self.shape)
        for rank, local in enumerate(locals_):
            self.put(local, rank, whole)
        return whole

    @property
    def _left(self) -> tuple[int, ...]:
        """The shape of each rank's tensor by this cut, without `inner`."""
        if not self.shape:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def _local_tensor(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's tensor by this cut, without `inner`, in memory of its own."""
        ranges = [whole.narrow(self.dim, start, stop - start) for start, stop in self.pieces[rank]]
        if missing := self.length - self.used(rank):
            ranges.append(whole.new_zeros((*self.shape[: self.dim], missing, *self.shape[self.dim + 1 :])))
        if len(ranges) == 1:
            return ranges[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(ranges, self.dim)
