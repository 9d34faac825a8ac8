"""The tiers of one engine: which store holds which numbers of its buckets off the device.

Communication: where a store is in host memory, one exchange of what ranks need there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from polyreme.layout.intervals import Interval
from polyreme.offload.gradients import OffloadedGradients
from polyreme.offload.host import pools, refuse_more
from polyreme.offload.host_transfer import HostTransfer
from polyreme.offload.optimizer_states import OffloadedStates
from polyreme.offload.parameters import OffloadedShard
from polyreme.offload.store import Store
from polyreme.optim.groups import Group
from polyreme.optim.quantized_states import States
from polyreme.zero.bucket import BucketMemory
from polyreme.zero.bucket_spec import BucketSpec
from polyreme.zero.buffer_pool import Pool


class OffloadTiers:
    """The stores of one engine.

    store: masters and optimizer states, which the CPU updates there (`compact`: see OffloadedStates).
    transfer: sends the updated parameters to the device. gradients: reduced gradients, where they do not stay
    on the device. parameters: all shards of parameters, where they do not."""

    def __init__(
        self,
        store: Store | None = None,
        parameters: Store | None = None,
        compact: States | None = None,
        transfer: HostTransfer | None = None,
        gradients: Store | None = None,
        gather: Callable[[object], list[Any]] = lambda value: [value],
    ) -> None:
        """`gather` returns each rank's value. All ranks have tiers of the same kinds."""
        self.store, self.parameters, self.compact = store, parameters, compact
        self.transfer, self.gradients, self._gather = transfer, gradients, gather

    def memory_of(self, spec: BucketSpec, groups: Sequence[Group], pool: Pool) -> BucketMemory:
        """Return the memory of a bucket, with its extents reserved in the stores. groups: the optimizer's."""
        states = shard = gradients = transfer = None
        if "states" in spec.offloaded and self.store is not None:
            master, transfer = spec.formats.master, self.transfer
            states = OffloadedStates(spec.layout, spec.region, groups, master, self.store, self.compact)
            if "gradients" in spec.offloaded and (sums := spec.accumulation) is not None:
                gradients = self.gradients_of(states, spec.region, sums.reduce, sums.how == "stored")
        if "params" in spec.offloaded and self.parameters is not None:
            shard = OffloadedShard(self.parameters, spec.layout.shard_size, spec.formats.compute)
        return BucketMemory(pool, states, shard, gradients, transfer)

    def gradients_of(
        self, states: OffloadedStates, region: slice, dtype: torch.dtype, adds: bool
    ) -> OffloadedGradients | None:
        """Reserve extents for the reduced gradients of a bucket's `region`, whose offloaded states are
        `states`; None where gradients stay on the device. `adds`: see `OffloadedGradients`."""
        if self.gradients is None:
            return None
        intervals = [Interval(0, region.stop - region.start)]
        if not self.gradients.in_memory:
            of_states = [extent.interval for extent in states]
            intervals = [Interval(each.start - region.start, each.stop - region.start) for each in of_states]
        return OffloadedGradients(self.gradients, intervals, dtype, adds)

    def commit(self) -> None:
        """Allocate all that was reserved. Raises TierError, on every rank where the ranks of one host
        together need more memory than it has, and where there is too little for this rank."""
        if near := [store for store in self._tiers().values() if store.in_memory]:
            needed = sum(store.nbytes for store in near)
            refuse_more(self._gather({"needed": needed, "pools": pools()}))
        for store in self._tiers().values():
            store.commit()

    @property
    def stores(self) -> list[Store]:
        """The stores of all tiers."""
        return [*self._tiers().values()]

    def close(self) -> None:
        """Free the stores."""
        for store in self._tiers().values():
            store.close()

    def memory(self, shards: int) -> int:
        """Return the bytes of host memory that tiers and their transfers take; `shards` is counted for
        parameters in files."""
        tiers = [store for store in self._tiers().values() if store is not self.parameters or store.in_memory]
        total = sum(store.buffers for store in tiers) + (0 if self.transfer is None else self.transfer.memory)
        return total + (0 if self.parameters is None or self.parameters.in_memory else shards)

    def report(self) -> dict[str, dict[str, float]]:
        """Return the value of `Engine.tiers`."""
        found = {}
        for name, store in self._tiers().items():
            store.settle()
            found[name] = {"bytes": store.nbytes, "memory": store.buffers, **asdict(store.traffic)}
        if self.transfer is not None:
            found["gradients"]["memory"] += self.transfer.memory
            found["gradients"]["read"] += self.transfer.sent
        return found

    def off_device_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, states and gradients off the device, by kind and place."""
        names = {"params": "parameters"}
        return {
            f"{names.get(name, name)}_{'host' if store.in_memory else 'files'}": store.nbytes
            for name, store in self._tiers().items()
        }

    def _tiers(self) -> dict[str, Store]:
        tiers = {"states": self.store, "params": self.parameters, "gradients": self.gradients}
        return {name: store for name, store in tiers.items() if store is not None}
