"""Memory of an engine's buckets that leaves the device between two steps and comes back, for scripts that
need the device in between.

Invariant: what is away is refused (`Bucket.require`); tensors and their views stay the same objects, on
storages that are empty meanwhile. No communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from polyreme.errors import ModelError
from polyreme.offload.activations import bytes_of
from polyreme.zero.bucket import ASLEEP, MEMORY_KINDS, Bucket, MemoryKind
from polyreme.zero.bucket_optimizer import BucketOptimizer
from polyreme.zero.parameter import IN_MEMORY, RELEASED


class Sleep:
    """Moves memory of `buckets`, and of their `optimizers`, off the device and back."""

    def __init__(self, buckets: Sequence[Bucket], optimizers: Iterable[BucketOptimizer]) -> None:
        self._buckets, self._optimizers = buckets, optimizers
        self._kept: list[tuple[UntypedStorage, Tensor]] = []  # emptied storages, and their contents
        self.kinds: dict[MemoryKind, str] = {}

    def refuse(self) -> None:
        """Raise ModelError if anything is away."""
        if self.kinds:
            raise ModelError(ASLEEP.format(", ".join(sorted(self.kinds)), min(self.kinds.values())))

    def sleep(self, kinds: Collection[MemoryKind], pin: bool, since: str) -> None:
        """Move these kinds of memory to the host, pinned if `pin`. Gradients are dropped, as there are none
        between steps. since: names the call that did it and the one that undoes it, for errors."""
        if any(bucket.is_exposed for bucket in self._buckets):
            raise ModelError(
                "engine.sleep() inside of engine.full_parameters(): call it behind the with block"
            )
        for kind in MEMORY_KINDS:
            if kind in kinds and kind not in self.kinds:
                self._take(kind, pin, since)
                self.kinds[kind] = since
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> tuple[MemoryKind, ...]:
        """Move everything back. Returns the kinds that were away."""
        with torch.no_grad(), torch.inference_mode(False):
            while self._kept:
                storage, kept = self._kept.pop()
                storage.resize_(kept.numel())
                bytes_of(storage).copy_(kept)
        for bucket in self._buckets:
            if "params" in bucket.asleep and not bucket.sharded:
                bucket.presence.become(IN_MEMORY, bucket.parameters)
            bucket.asleep.clear()
        found = tuple(self.kinds)
        self.kinds.clear()
        return found

    def _take(self, kind: MemoryKind, pin: bool, since: str) -> None:
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
            # storage that ranks share, or that maps a file, stays
            if storage.resizable() and storage.nbytes():
                kept = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=pin and tensor.device.type == "cuda"
                )
                kept.copy_(bytes_of(storage))
                storage.resize_(0)
                self._kept.append((storage, kept))

    def _memory(self, kind: MemoryKind) -> Iterable[Tensor]:
        """Return the tensors that hold all device memory of a kind."""
        if kind == "states":
            for optimizer in self._optimizers:
                yield from optimizer.on_device() if optimizer.offloaded is None else ()
        for bucket in self._buckets:
            if kind == "masters" and bucket.has_copy and bucket.master is not None:
                yield bucket.master
            if kind == "params":
                yield bucket.full
                if bucket.device_shard is not None:
                    yield bucket.device_shard
