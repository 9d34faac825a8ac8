"""Memory of an engine's buckets that leaves the device between two steps, and comes back: for a script that
needs the device for something else meanwhile.

Invariant: what is away is refused (`Bucket.require`); tensors and the views of them stay the same ones, of
memory that is empty meanwhile. No communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from polyreme.errors import ModelError
from polyreme.offload.activations import bytes_of
from polyreme.zero.bucket import ASLEEP, KINDS, Bucket, Kind
from polyreme.zero.parameter import RELEASED, WHOLE
from polyreme.zero.sharded_optimizer import Update


class Sleep:
    """What of `buckets` and of `updates`, their optimizers, is away."""

    def __init__(self, buckets: Sequence[Bucket], updates: Iterable[Update]) -> None:
        self._buckets, self._updates = buckets, updates
        self._kept: list[tuple[UntypedStorage, Tensor]] = []  # empty ones, and what was in them
        self.kinds: dict[Kind, str] = {}

    def refuse(self) -> None:
        """Raise ModelError if anything is away."""
        if self.kinds:
            raise ModelError(ASLEEP.format(", ".join(sorted(self.kinds)), min(self.kinds.values())))

    def sleep(self, kinds: Collection[Kind], pin: bool, since: str) -> None:
        """Have these be in host memory, which is pinned if so said; gradients are let go of, as there are
        none between steps. since: what was called, and what undoes it."""
        if any(bucket.is_summoned for bucket in self._buckets):
            raise ModelError(
                "engine.sleep() inside of engine.full_parameters(): call it behind the with block"
            )
        for kind in KINDS:
            if kind in kinds and kind not in self.kinds:
                self._take(kind, pin, since)
                self.kinds[kind] = since
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> tuple[Kind, ...]:
        """Have all be where it was. Returns what was away."""
        with torch.no_grad(), torch.inference_mode(False):
            while self._kept:
                storage, kept = self._kept.pop()
                storage.resize_(kept.numel())
                bytes_of(storage).copy_(kept)
        for bucket in self._buckets:
            if "params" in bucket.asleep and not bucket.sharded:
                bucket.presence.become(WHOLE, bucket.parameters)
            bucket.asleep.clear()
        found = tuple(self.kinds)
        self.kinds.clear()
        return found

    def _take(self, kind: Kind, pin: bool, since: str) -> None:
        for bucket in self._buckets:
            bucket.release()
            bucket.settle()
            if kind == "gradients":
                bucket.gradients.drop()
                continue
            bucket.asleep[kind] = since
            if kind == "params" and not bucket.sharded:
                bucket.presence.become(RELEASED, bucket.parameters)
        for tensor in self._memory(kind):
            storage = tensor.untyped_storage()
            # that of ranks which share memory, or of a file, stays
            if storage.resizable() and storage.nbytes():
                kept = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=pin and tensor.device.type == "cuda"
                )
                kept.copy_(bytes_of(storage))
                storage.resize_(0)
                self._kept.append((storage, kept))

    def _memory(self, kind: Kind) -> Iterable[Tensor]:
        """Tensors that have all the device's memory of a kind."""
        if kind == "states":
            for update in self._updates:
                yield from update.on_device() if update.offloaded is None else ()
        for bucket in self._buckets:
            if kind == "masters" and bucket.has_copy and bucket.master is not None:
                yield bucket.master
            if kind == "params":
                yield bucket.full
                if bucket.device_shard is not None:
                    yield bucket.device_shard
