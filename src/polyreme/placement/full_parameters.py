"""Whole parameters for the user, to read or to write; and writes to them from outside, which a step takes in.

Invariants: what shares the memory of a summoned parameter stays good for ever; on leaving `writable`, every
rank takes one rank's numbers of what several have; a master keeps its digits where the parameter is still
what it was rounded to.
Communication: gathers; broadcasts of what was written; what ranks tell each other of parameters written from
outside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import ALIGN, align
from polyreme.layout.intervals import overlap
from polyreme.layout.region import MASTER
from polyreme.placement.placement import Placement
from polyreme.zero.bucket import Bucket

FIRST = {"loss": 0, "tp": 0, "pp": 0}
"""The place of the first rank."""


@contextmanager
def readable(placement: Placement, names: Collection[str] | None = None) -> Iterator[None]:
    """All parameters whole, to be read. Raises ModelError on leaving if one was written to, where that would
    be lost. names: those of parameters that are needed; buckets without any of these stay as they are."""
    buckets = [bucket for bucket in placement.holding(names) if bucket.sharded]
    with _summoned(buckets) as numbers:
        before = [_digests(bucket, flat) for bucket, flat in zip(buckets, numbers, strict=True)]
        yield
    after = [_digests(bucket, flat) for bucket, flat in zip(buckets, numbers, strict=True)]
    changed = [slot.name for bucket, old, new in zip(buckets, before, after, strict=True)
               for slot, a, b in zip(bucket.layout.slots, old, new, strict=True) if a != b]  # fmt: skip
    if changed:
        raise ModelError(
            f"parameter {changed[0]}{f' and {len(changed) - 1} more' if changed[1:] else ''} "
            "changed inside engine.full_parameters(), "
            "which was entered to read: write `with engine.full_parameters(write=True):` to have it kept"
        )


@contextmanager
def writable(
    placement: Placement, names: Collection[str] | None = None, writer: Mapping[str, int] = FIRST
) -> Iterator[None]:
    """All parameters whole, to be written: what they are at the end reaches masters and shards, unless the
    block ends in an error. names: as in `readable`. writer: whose numbers count, by its place on each
    axis."""
    buckets = placement.holding(names)
    with _summoned(buckets) as summoned:
        yield
    for bucket, numbers in zip(buckets, summoned, strict=True):
        bucket.axis.broadcast(numbers, writer["loss"])
        if bucket.tie is not None:
            ranks = placement.division.ranks_of(bucket.stages)
            bucket.tie.broadcast(numbers, ranks.index(writer["pp"]) if writer["pp"] in ranks else 0)
        _share(placement, bucket, numbers, writer["tp"])
        _adopt(bucket, numbers)


@contextmanager
def _summoned(buckets: Sequence[Bucket]) -> Iterator[list[Tensor]]:
    """Have the buckets' parameters whole inside. Yields them, flat; at the end they are what was
    reclaimed."""
    numbers = [bucket.summon() for bucket in buckets]
    try:
        yield numbers
    except BaseException:
        with suppress(ModelError):
            _reclaim(buckets)
        raise
    numbers[:] = _reclaim(buckets)


def _adopt(bucket: Bucket, numbers: Tensor) -> None:
    """Take `numbers` (flat, in the compute dtype, the same on every rank) for a bucket's parameters; the
    master keeps its digits where they are what it was rounded to."""
    bucket.require("masters")
    bucket.settle()
    if bucket.has_copy:
        part, begin, end = numbers[bucket.region], bucket.region.start, bucket.region.stop
        master = bucket.master if bucket.master is not None else bucket.part(begin, end)
        adopted = torch.where(part == master.to(part.dtype), master, part.to(master.dtype))
        if bucket.master is not None:
            bucket.master.copy_(adopted)
        for slot in bucket.layout.slots if bucket.offloaded_states is not None else ():
            inside = overlap(slot, bucket.region)
            if bucket.offloaded_states is not None and inside:
                bucket.offloaded_states.write(MASTER, inside.start, adopted[inside.since(begin)])
    bucket.set(numbers)


def _reclaim(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Reclaim all of them. Raises ModelError when that is done, where one cannot be taken back."""
    found: list[Tensor] = []
    problems: list[ModelError] = []
    for bucket in buckets:
        try:
            found.append(bucket.reclaim())
        except ModelError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return found


def _share(placement: Placement, bucket: Bucket, numbers: Tensor, source: int) -> None:
    """Give every rank of tensor parallelism the numbers that rank `source` of it has of the parameters that
    all of them have whole."""
    if placement.division.tp.size > 1:
        for slot in bucket.layout.slots:
            if placement.division.shardings[slot.name].cut.is_whole:
                placement.division.tp.broadcast(numbers[slot.start : slot.stop], source)


class Written:
    """Tells whether parameters that are always here were written to from outside since `note`: by autograd's
    count of writes, by where their memory is, and, where a master would undo the write (through `.data`, or
    NumPy), by sums of what the master was rounded to. Whether ranks still have the same numbers is seen of a
    part at a time, all of it in about `TURN` steps."""

    TURN = 64
    LEAST = 1 << 18  # numbers of a part: fewer would save nothing

    def __init__(self, buckets: Sequence[Bucket], axis: Axis, passed: Collection[int] = ()) -> None:
        """passed: ids of parameters that forwards write, which is counted elsewhere."""
        self._passed = passed
        self._buckets = [bucket for bucket in buckets if not bucket.sharded]
        self._copies = [bucket for bucket in self._buckets if bucket.has_copy]
        self._axis = axis
        part = align(max(self.LEAST, sum(bucket.layout.size for bucket in self._buckets) // self.TURN))
        cuts = [
            (bucket.full, start, start + part)
            for bucket in self._buckets
            for start in range(0, bucket.layout.size, part)
        ]
        self._parts = itertools.cycle(cuts if axis.size > 1 else ())
        self._counts: dict[Bucket, list[tuple[int, int]]] = {}
        self._sums: dict[Bucket, Tensor] = {}
        self.note()

    def note(self, bucket: Bucket | None = None) -> None:
        """Note the engine's own writes, to one bucket or to any: all is as it should be."""
        self._counts |= self._counted(bucket)
        self._sums |= self._summed(bucket)

    def seen(self, device: torch.device, bucket: Bucket | None = None) -> Tensor:
        """1 if there was a write on this rank, to one bucket or to any, else 0: a float64 scalar on the
        device, which is not waited for."""
        if any(self._counts[each] != count for each, count in self._counted(bucket).items()):
            return torch.ones((), dtype=torch.float64, device=device)
        changed = [self._sums[each] != now for each, now in self._summed(bucket).items()]
        return (
            torch.stack(changed).any().to(device, torch.float64)
            if changed
            else torch.zeros((), dtype=torch.float64, device=device)
        )

    def digest(self, device: torch.device) -> Tensor:
        """A digest of the next part of the parameters: a whole number below 2^14 that differs, almost surely,
        where a rank has other numbers; a float64 scalar on the device. Every rank of the axis must call as
        often."""
        for full, start, stop in itertools.islice(self._parts, 1):
            # each bit of the sum reaches the highest ones
            return (_sum(full[start:stop]) * 0x1E3779B97F4A7C15 >> 50 & 0x3FFF).to(device, torch.float64)
        return torch.zeros((), dtype=torch.float64, device=device)

    def take_in(self) -> None:
        """Let a write on any rank reach the masters. Every rank must call. Raises ModelError on every rank
        where they differ."""
        _reclaim(self._buckets)
        names = [slot.name for bucket in self._buckets for slot in bucket.layout.slots]
        told: list[Any] = self._axis.gather_objects(
            [digest for bucket in self._buckets for digest in _digests(bucket, bucket.full)]
        )
        if differing := [
            name for name, found in zip(names, zip(*told, strict=True), strict=True) if len(set(found)) > 1
        ]:
            raise ModelError(
                f"parameter {differing[0]} has not the same numbers on every "
                "rank. If it was written to between steps: write the same "
                "on all ranks, or inside `with engine.full_parameters(write=True):`, "
                "where rank 0's count. If not, these ranks do not "
                "compute alike"
            )
        for bucket in self._buckets:
            bucket.settle()
            _adopt(bucket, bucket.full)

    def settle(self, before: Callable[[], object], bucket: Bucket | None = None) -> None:
        """Let a write on any rank, to one bucket or to any, reach the masters at once, after `before` is
        called. Every rank must call. Raises ModelError inside of `writable`."""
        if any(bucket.is_summoned for bucket in self._buckets):
            raise ModelError(
                "inside of another one, `with engine.full_parameters(write=True):`, "
                "whose writes count from its end on: call this after "
                "the with block"
            )
        told: list[Any] = self._axis.gather_objects(bool(self.seen(torch.device("cpu"), bucket)))
        if any(told):
            before()
            self.take_in()
            self.note()

    def _counted(self, bucket: Bucket | None) -> dict[Bucket, list[tuple[int, int]]]:
        passed = self._passed
        return {
            each: [(0 if passed and id(p) in passed else p._version, p.data_ptr()) for p in each.parameters]
            for each in self._buckets
            if bucket in (None, each) and "params" not in each.asleep
        }

    def _summed(self, bucket: Bucket | None) -> dict[Bucket, Tensor]:
        return {
            each: _sum(each.full[each.own])
            for each in self._copies
            if bucket in (None, each) and "params" not in each.asleep
        }


def _sum(numbers: Tensor) -> Tensor:
    """A number that is another one when any of `numbers` is, or when some change places."""
    words = numbers.view(torch.int64).view(-1, ALIGN * numbers.element_size() // 8)
    rows, columns = words.sum(1), words.sum(0)
    return (rows * _odd(rows)).sum() + 0x9E3779B9 * (columns * _odd(columns)).sum()


def _odd(numbers: Tensor) -> Tensor:
    """1, 3, 5, ..., as many as there are numbers."""
    return torch.arange(1, 2 * len(numbers) + 1, 2, device=numbers.device)


def _digests(bucket: Bucket, flat: Tensor) -> list[int]:
    """A digest of each parameter's numbers, in order: it changes when they do."""
    found = []
    for slot in bucket.layout.slots:
        words = flat[slot.start : align(slot.stop)].view(torch.int64)
        found.append(int((words * torch.arange(1, len(words) + 1, device=words.device)).sum()))
    return found
