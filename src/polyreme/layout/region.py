"""Regions: the places in whole tensors of the numbers that a rank holds. Pure.

A rank holds a range of its flattened local tensor, which is cut along one dimension or several. In the
whole tensor that is one run of numbers, or, where the tensor was cut along a later dimension, many equal runs
at equal distances.

Invariant: `strided_ranges` over all ranks covers every number of the tensor; with `owned` each exactly once;
padding is in no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyreme.layout.bucket_layout import Cut
from polyreme.layout.intervals import Interval, ceil_div, chunks, overlap

MODEL = "model"
"""The kind of the weights themselves, in the dtype that the model computes in."""
MASTER = "master"
"""The kind of the optimizer's full-precision copy of the weights. Every other kind is one of its states, such
as `exp_avg`."""


@dataclass(frozen=True)
class StridedRange:
    """`count` runs of `size` elements. The i-th begins at local + i * local_step of the rank's flattened
    local tensor, and at whole + i * whole_step of the whole one. Runs never overlap and come in rising
    order."""

    local: int
    whole: int
    size: int
    count: int = 1
    local_step: int = 0
    whole_step: int = 0

    @property
    def elements(self) -> int:
        return self.size * self.count

    def of(self, flat: Tensor, base: int = 0) -> Tensor:
        """Return the runs as a view of shape (count, size) of `flat`, which begins at element `base` of the
        rank's local tensor."""
        return flat.as_strided(
            (self.count, self.size),
            (self.local_step or self.size, 1),
            flat.storage_offset() + self.local - base,
        )

    def blocks(self, elements: int) -> Iterator[StridedRange]:
        """Yield the same runs in chunks of at most `elements` elements: several runs each, or a range of
        one."""
        if self.size > elements:
            for i in range(self.count):
                local, whole = self.local + i * self.local_step, self.whole + i * self.whole_step
                for inside in chunks(Interval(0, self.size), elements):
                    yield StridedRange(local + inside.start, whole + inside.start, inside.size)
            return
        each = elements // self.size
        for i, stop in chunks(Interval(0, self.count), each):
            yield StridedRange(
                self.local + i * self.local_step,
                self.whole + i * self.whole_step,
                self.size,
                stop - i,
                self.local_step,
                self.whole_step,
            )


@dataclass(frozen=True)
class Stored:
    """Numbers of a tensor that are not in memory: `fetch(start, stop)` returns some of them, flat."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[int, int], Tensor]

    def numel(self) -> int:
        return _product(self.shape)


def slice_of(numbers: Tensor | Stored, start: int, stop: int) -> Tensor | Stored:
    """Return the elements [start, stop) of flattened numbers: a view of a tensor, or Stored."""
    if isinstance(numbers, Stored):
        fetch = numbers.fetch
        return Stored(numbers.dtype, (stop - start,), lambda low, high: fetch(start + low, start + high))
    return numbers.detach().view(-1)[start:stop]


def fetched(numbers: Tensor | Stored, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the elements [start, stop) of flattened numbers, or all, in memory: a view where they are there
    already."""
    if isinstance(numbers, Stored):
        return numbers.fetch(start, numbers.numel() if stop is None else stop)
    return numbers.detach().reshape(-1)[start:stop]


@dataclass(frozen=True)
class Region:
    """A range of one of the model's tensors, and this rank's numbers of it.

    `kind`: MODEL, MASTER, or the name of an optimizer's state. `names`: all names that the model has for the
    tensor. `cut`: how the tensor is divided over ranks, and `rank` this rank's place in that. `data`: the
    elements from `start` on of this rank's local tensor, flat, in memory or not."""

    kind: str
    names: Sequence[str]
    cut: Cut
    rank: int
    start: int
    data: Tensor | Stored

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.cut.shape

    def strided_ranges(self, owned: bool = False) -> list[StridedRange]:
        """Return the places of the numbers in the whole tensor; with `owned`, only of those that no earlier
        rank of the cut holds."""
        return strided_ranges(self.cut, self.rank, self.start, self.start + self.data.numel(), owned)

    def read(self, strided: StridedRange) -> Tensor:
        """Return the numbers of `strided`, one of this region's, in shape (count, size); a view where they
        are in memory."""
        if isinstance(self.data, Tensor):
            return strided.of(self.data, self.start)
        first = strided.local - self.start
        return replace(strided, local=0).of(
            self.data.fetch(first, first + (strided.count - 1) * strided.local_step + strided.size)
        )


def strided_ranges(cut: Cut, rank: int, start: int, stop: int, owned: bool = False) -> list[StridedRange]:
    """Return the places in the whole tensor of elements [start, stop) of rank `rank`'s flattened tensor,
    which has the shape `cut.local`; without its padding, and with `owned` without numbers that an earlier
    rank holds."""
    along = cut.along(rank)
    if start >= stop or (owned and any(place and each.keeps for each, place in along)):
        return []
    dividing = sorted((each for each in along if not each[0].keeps), key=lambda each: each[0].dim)
    return [clipped for run in _runs(cut.shape, dividing, owned) for clipped in _clip(run, start, stop)]


def _runs(shape: tuple[int, ...], along: Sequence[tuple[Cut, int]], owned: bool) -> Iterator[StridedRange]:
    """Yield the runs of a rank's local tensor, which is cut along several dimensions, in their order."""
    if not along:
        yield StridedRange(0, 0, _product(shape))
        return
    cut, rank = along[-1]
    taken = {piece for pieces in cut.pieces[:rank] for piece in pieces} if owned else set()
    inner = _product(shape[cut.dim + 1 :])
    local_step, whole_step = cut.length * inner, shape[cut.dim] * inner
    for rows in _runs(shape[: cut.dim], along[:-1], owned):
        for i in range(rows.count):
            local = (rows.local + i * rows.local_step) * local_step
            whole = (rows.whole + i * rows.whole_step) * whole_step
            for a, b in cut.pieces[rank]:
                if (a, b) not in taken and a < b:
                    size = (b - a) * inner
                    yield StridedRange(local, whole + a * inner, size, rows.size, local_step, whole_step)
                local += (b - a) * inner


def _clip(strided: StridedRange, start: int, stop: int) -> list[StridedRange]:
    """Return the elements of `strided` that are among [start, stop) of the rank's local tensor: the end of a
    first run, whole runs, the beginning of a last one."""
    step = strided.local_step or strided.size
    first = max(0, ceil_div(start - strided.local, step))  # the first run that begins at `start` or later
    # the first run after it that ends after `stop`
    after = min(strided.count, max(first, (stop - strided.local - strided.size) // step + 1))
    found = []
    if 0 < first <= strided.count:
        found += _clipped_run(strided, first - 1, start, stop)
    if after > first:
        found.append(
            StridedRange(
                strided.local + first * strided.local_step,
                strided.whole + first * strided.whole_step,
                strided.size,
                after - first,
                strided.local_step if after > first + 1 else 0,
                strided.whole_step if after > first + 1 else 0,
            )
        )
    if first <= after < strided.count:
        found += _clipped_run(strided, after, start, stop)
    return found


def _clipped_run(strided: StridedRange, i: int, start: int, stop: int) -> list[StridedRange]:
    local = strided.local + i * strided.local_step
    inside = overlap(Interval(local, local + strided.size), Interval(start, stop))
    offset = i * strided.whole_step + inside.start - local
    return [StridedRange(inside.start, strided.whole + offset, inside.size)] if inside else []


def _product(sizes: tuple[int, ...]) -> int:
    return int(torch.Size(sizes).numel())
