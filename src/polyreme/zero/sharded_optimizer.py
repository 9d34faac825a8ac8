"""The optimizer over all buckets of a rank, and what is read ahead for them from files.

Communication: none but what `Bucket.publish` begins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from polyreme.offload.store import Stream
from polyreme.optim.groups import Group
from polyreme.optim.quantized_states import States
from polyreme.zero.bucket import Bucket
from polyreme.zero.bucket_optimizer import BucketOptimizer
from polyreme.zero.offload_tiers import OffloadTiers


class ShardedOptimizer:
    """The optimizer of all trainable `buckets` of a rank: that of each bucket, one after the other."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        offload: OffloadTiers,
        groups: Sequence[Group],
        compact: States | None,
    ) -> None:
        """`offload` has the buckets' stores. `groups` and `compact`: see `Pieces`."""
        self._optimizers = [BucketOptimizer(bucket, groups, compact) for bucket in buckets]
        self._offload = offload
        self._states: Stream | None = None
        self._gradients: Stream | None = None

    def __iter__(self) -> Iterator[BucketOptimizer]:
        return iter(self._optimizers)

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizers' own states in device memory."""
        return sum(optimizer.nbytes() for optimizer in self)

    def forget(self) -> None:
        """Drop all optimizers and their states."""
        self._optimizers = []

    def read_states(self) -> None:
        """Begin to read the states that the update begins with, where they are in a store."""
        store = self._offload.store
        if store is not None and self._states is None:
            self._states = store.stream([extent for optimizer in self for extent in optimizer.order])

    def read_gradients(self) -> None:
        """Begin to read the gradients, once all are stored, where they are in files."""
        extents = [extent for optimizer in self for extent in optimizer.bucket.gradients.extents or ()]
        if self._offload.gradients is not None and extents:
            self._gradients = self._offload.gradients.stream(extents, write=False)

    def step(
        self,
        factor: float,
        options: Sequence[Mapping[str, Any]],
        unused: Mapping[Bucket, Collection[int]],
        count: int,
    ) -> None:
        """Make one optimizer step from the gradients times `factor`, and send one bucket's parameters while
        the next is updated. The other arguments are those of `BucketOptimizer.step`."""
        works = []
        for optimizer in self:
            bucket = optimizer.bucket
            absent = unused.get(bucket, ())
            optimizer.step(factor, options, absent, self._states or (), count, self._gradients or ())
            works.append(bucket.publish())
        if self._states is not None:
            self._states.close()  # waits until everything is written
        for work in works:
            work.settle()  # a script may write to parameters from here on

    def clear(self) -> None:
        """Drop what was read ahead."""
        for stream in (self._states, self._gradients):
            if stream is not None:
                stream.close()
        self._states = self._gradients = None
