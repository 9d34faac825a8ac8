"""The optimizers of all buckets of a rank, and what is read ahead for them from files.

Communication: none but what `Bucket.publish` begins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from polyreme.offload.store import Stream
from polyreme.optim.groups import Group
from polyreme.optim.quantized_states import States
from polyreme.zero.bucket import Bucket
from polyreme.zero.offload_tiers import OffloadTiers
from polyreme.zero.sharded_optimizer import Update


class Updates:
    """Updates trainable `buckets`, one after the other."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        offload: OffloadTiers,
        groups: Sequence[Group],
        compact: States | None,
    ) -> None:
        """`offload` has what of them is in stores. `groups` are those of the optimizer, `compact` is how its
        moments are kept (see `Update`)."""
        self._updates = [Update(bucket, groups, compact) for bucket in buckets]
        self._offload = offload
        self._states: Stream | None = None
        self._gradients: Stream | None = None

    def __iter__(self) -> Iterator[Update]:
        return iter(self._updates)

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizers' own states in the device's memory."""
        return sum(update.nbytes() for update in self)

    def forget(self) -> None:
        """Let go of all optimizers, of whose states none is to be seen then."""
        self._updates = []

    def read_states(self) -> None:
        """Begin to read the states that the update begins with, where they are in a store."""
        store = self._offload.store
        if store is not None and self._states is None:
            self._states = store.stream([extent for update in self for extent in update.order])

    def read_gradients(self) -> None:
        """Begin to read the gradients, once all are there, where they are in files."""
        extents = [extent for update in self for extent in update.bucket.gradients.extents or ()]
        if self._offload.gradients is not None and extents:
            self._gradients = self._offload.gradients.stream(extents, write=False)

    def step(
        self,
        factor: float,
        options: Sequence[Mapping[str, Any]],
        unused: Mapping[Bucket, Collection[int]],
        count: int,
    ) -> None:
        """Update from the gradients times `factor`; one bucket's parameters travel while the next is updated.
        The rest is as in `Update.step`."""
        works = []
        for update in self:
            bucket = update.bucket
            absent = unused.get(bucket, ())
            update.step(factor, options, absent, self._states or (), count, self._gradients or ())
            works.append(bucket.publish())
        if self._states is not None:
            self._states.close()  # which waits until all is written
        for work in works:
            work.settle()  # a script may write to parameters from here on

    def clear(self) -> None:
        """Drop what was read ahead."""
        for stream in (self._states, self._gradients):
            if stream is not None:
                stream.close()
        self._states = self._gradients = None
