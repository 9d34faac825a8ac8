"""Whole parameters for the user to read or to write; and writes from outside, which the next step takes in.

Invariants: memory that was given to the user stays valid; on leaving `writable`, every rank takes one rank's
numbers of a parameter that several have; a master keeps its digits where the parameter still equals the
rounded master.
Communication: gathers; broadcasts of written parameters; small reports of which parameters were written from
outside."""

from __future__ import annotations

import math
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
"""The first rank, by its place on each axis."""


@contextmanager
def readable(
    placement: Placement, names: Collection[str] | None = None, *, by_user: bool = False
) -> Iterator[None]:
    """Make all parameters whole, to be read. Raises ModelError on leaving if one that is sharded was written
    to, which would be lost, or, where code of the user's runs inside (by_user), any. names: of the parameters
    that are needed; buckets without any of them are left alone."""
    buckets = placement.holding(names)
    sharded = [bucket for bucket in buckets if bucket.sharded]
    whole = [bucket for bucket in buckets if by_user and not bucket.sharded]

    def digests() -> list[Sequence[object]]:
        return [*map(_digests, sharded, numbers), *map(_live_digests, whole)]

    with _exposed(sharded) as numbers:
        before = digests()
        yield
    changed = [slot.name for bucket, old, new in zip((*sharded, *whole), before, digests(), strict=True)
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
    """Make all parameters whole, to be written: their values at the end go to masters and shards, unless the
    block ends in an error. names: as in `readable`. writer: the rank whose numbers count, by its place on
    each axis."""
    buckets = placement.holding(names)
    with _exposed(buckets) as exposed:
        yield
    for bucket, numbers in zip(buckets, exposed, strict=True):
        bucket.axis.broadcast(numbers, writer["loss"])
        if bucket.tie is not None:
            ranks = placement.division.ranks_of(bucket.stages)
            bucket.tie.broadcast(numbers, ranks.index(writer["pp"]) if writer["pp"] in ranks else 0)
        _share(placement, bucket, numbers, writer["tp"])
        _set_parameters(bucket, numbers)


@contextmanager
def _exposed(buckets: Sequence[Bucket]) -> Iterator[list[Tensor]]:
    """Expose the buckets' parameters whole inside, and yield them, flat. On leaving, the list holds what they
    were at the end."""
    numbers = [bucket.expose_whole() for bucket in buckets]
    try:
        yield numbers
    except BaseException:
        with suppress(ModelError):
            _restore_views(buckets)
        raise
    numbers[:] = _restore_views(buckets)


def _set_parameters(bucket: Bucket, numbers: Tensor) -> None:
    """Set a bucket's parameters to `numbers` (flat, in the compute dtype, the same on every rank). The master
    keeps its digits wherever rounding it gives the same number."""
    bucket.require("masters")
    bucket.settle()
    if bucket.has_copy:
        own, begin, end = numbers[bucket.region], bucket.region.start, bucket.region.stop
        master = bucket.master if bucket.master is not None else bucket.read_masters(begin, end)
        masters = torch.where(own == master.to(own.dtype), master, own.to(master.dtype))
        if bucket.master is not None:
            bucket.master.copy_(masters)
        for slot in bucket.layout.slots if bucket.offloaded_states is not None else ():
            inside = overlap(slot, bucket.region)
            if bucket.offloaded_states is not None and inside:
                bucket.offloaded_states.write(MASTER, inside.start, masters[inside.since(begin)])
    bucket.set(numbers)


def _restore_views(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Restore the views of all these buckets, and return their parameters, flat. If one cannot be restored,
    raises its ModelError after the others are done."""
    found: list[Tensor] = []
    problems: list[ModelError] = []
    for bucket in buckets:
        try:
            found.append(bucket.restore_views())
        except ModelError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return found


def _share(placement: Placement, bucket: Bucket, numbers: Tensor, source: int) -> None:
    """Give every tensor-parallel rank the numbers of rank `source` for the parameters that all of them have
    whole."""
    if placement.division.tp.size > 1:
        for slot in bucket.layout.slots:
            if placement.division.parameters[slot.name].cut.is_whole:
                placement.division.tp.broadcast(numbers[slot.start : slot.stop], source)


class UserWrites:
    """Detects writes from outside to parameters that are always in memory, since `note`.

    It compares autograd's version counts, memory addresses, and, where a master would undo a write (through
    `.data` or NumPy), checksums of the rounded masters. (Whether ranks still have the same numbers is checked
    by `step.replicas`.)"""

    def __init__(self, buckets: Sequence[Bucket], axis: Axis, passed: Collection[int] = ()) -> None:
        """passed: ids of parameters that forwards write, which is counted elsewhere."""
        self._passed = passed
        self._buckets = [bucket for bucket in buckets if not bucket.sharded]
        self._copies = [bucket for bucket in self._buckets if bucket.has_copy]
        self._axis = axis
        self._counts: dict[Bucket, list[tuple[int, int]]] = {}
        self._sums: dict[Bucket, Tensor] = {}
        self.note()

    def note(self, bucket: Bucket | None = None) -> None:
        """Note the engine's own writes, to one bucket or to any, as the state to compare with."""
        self._counts |= self._counted(bucket)
        self._sums |= self._summed(bucket)

    def seen(self, device: torch.device, bucket: Bucket | None = None) -> Tensor:
        """Return 1 if there was a write on this rank, to one bucket or to any, else 0: a float64 scalar on
        the device, which is not waited for."""
        if any(self._counts[each] != count for each, count in self._counted(bucket).items()):
            return torch.ones((), dtype=torch.float64, device=device)
        changed = [self._sums[each] != now for each, now in self._summed(bucket).items()]
        return (
            torch.stack(changed).any().to(device, torch.float64)
            if changed
            else torch.zeros((), dtype=torch.float64, device=device)
        )

    def take_in(self) -> None:
        """Take a write on any rank into the masters. Every rank must call. Raises ModelError on every rank
        where parameters differ."""
        _restore_views(self._buckets)
        names = [slot.name for bucket in self._buckets for slot in bucket.layout.slots]
        gathered: list[Any] = self._axis.gather_objects(
            [digest for bucket in self._buckets for digest in _digests(bucket, bucket.full)]
        )
        if differing := [
            name
            for name, found in zip(names, zip(*gathered, strict=True), strict=True)
            if len(set(found)) > 1
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
            _set_parameters(bucket, bucket.full)

    def settle(self, before: Callable[[], object], bucket: Bucket | None = None) -> None:
        """Take a write on any rank, to one bucket or to any, into the masters at once, after calling
        `before`. Every rank must call. Raises ModelError inside of `writable`."""
        if any(bucket.is_exposed for bucket in self._buckets):
            raise ModelError(
                "inside of another one, `with engine.full_parameters(write=True):`, "
                "whose writes count from its end on: call this after "
                "the with block"
            )
        gathered: list[Any] = self._axis.gather_objects(bool(self.seen(torch.device("cpu"), bucket)))
        if any(gathered):
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
            each: checksum(each.full[each.own])
            for each in self._copies
            if bucket in (None, each) and "params" not in each.asleep
        }


def checksum(numbers: Tensor) -> Tensor:
    """Return a checksum of whole lines of ALIGN numbers: an int64 scalar on their device. It changes when any
    one bit does, and almost surely when several do or numbers change places."""
    words = numbers.view(torch.int64)
    words = words.view(-1, math.gcd(len(words), ALIGN))
    rows, columns = words.sum(1), words.sum(0)
    # an odd and an even factor, whose sum is odd: an even one would lose the highest bit
    return (rows * _odd(rows)).sum() + 0x9E3779B8 * (columns * _odd(columns)).sum()


def _odd(numbers: Tensor) -> Tensor:
    """Return 1, 3, 5, ..., as many as there are numbers."""
    return torch.arange(1, 2 * len(numbers) + 1, 2, device=numbers.device)


def _digests(bucket: Bucket, flat: Tensor) -> list[int]:
    """Return a digest of each parameter's numbers, in order."""
    return [int(checksum(flat[slot.start : align(slot.stop)])) for slot in bucket.layout.slots]


def _live_digests(bucket: Bucket) -> list[tuple[int, bool]]:
    """Return of each parameter that is always in memory a digest of its numbers there, and whether a script
    gave it others of its shape elsewhere. (One of another shape was replaced, which is told of later.)"""
    bucket.require("params")
    flat = bucket.full
    moved = [
        each.shape == slot.shape and each.data_ptr() - flat.data_ptr() != slot.start * flat.itemsize
        for slot, each in zip(bucket.layout.slots, bucket.parameters, strict=True)
    ]
    return [*zip(_digests(bucket, flat), moved, strict=True)]
