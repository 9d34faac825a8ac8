"""The tiers of one engine: which store has what of its buckets off the device.

Communication: where any of it is in host memory, one exchange of what ranks need there."""

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
    """What is not in the device's memory: masters and states, which are in `store` (`compact`: see
    OffloadedStates), from which the CPU updates them, and reaches the device by `transfer`; their
    `gradients`, where those do not stay; and the shards of all `parameters`, where they do not."""

    def __init__(
        self,
        store: Store | None = None,
        parameters: Store | None = None,
        compact: States | None = None,
        transfer: HostTransfer | None = None,
        gradients: Store | None = None,
        gather: Callable[[object], list[Any]] = lambda value: [value],
    ) -> None:
        """`gather` returns what every rank gives; all ranks have tiers of the same kinds."""
        self.store, self.parameters, self.compact = store, parameters, compact
        self.transfer, self.gradients, self._gather = transfer, gradients, gather

    def memory_of(self, spec: BucketSpec, groups: Sequence[Group], pool: Pool) -> BucketMemory:
        """The memory of a bucket, with its extents in the stores. groups: those of the optimizer."""
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
        """The reduced gradients of a bucket's `region`, whose offloaded states are `states`, where they do
        not stay. `adds`: see there."""
        if self.gradients is None:
            return None
        parts = [Interval(0, region.stop - region.start)]
        if not self.gradients.in_memory:
            intervals = [extent.interval for extent in states]
            parts = [Interval(each.start - region.start, each.stop - region.start) for each in intervals]
        return OffloadedGradients(self.gradients, parts, dtype, adds)

    def commit(self) -> None:
        """Take the space of all that was reserved. Raises TierError on every rank where ranks of one host
        together need more of its memory than there is, and where there is too little for this one."""
        if near := [store for store in self._tiers().values() if store.in_memory]:
            needed = sum(store.nbytes for store in near)
            refuse_more(self._gather({"needed": needed, "pools": pools()}))
        for store in self._tiers().values():
            store.commit()

    def close(self) -> None:
        """Give the space back."""
        for store in self._tiers().values():
            store.close()

    def memory(self, shards: int) -> int:
        """Bytes of host memory that tiers take, or what it takes to move theirs; of parameters in files as
        many as `shards`."""
        tiers = [store for store in self._tiers().values() if store is not self.parameters or store.in_memory]
        total = sum(store.buffers for store in tiers) + (0 if self.transfer is None else self.transfer.memory)
        return total + (0 if self.parameters is None or self.parameters.in_memory else shards)

    def report(self) -> dict[str, dict[str, float]]:
        """What `Engine.tiers` returns."""
        found = {}
        for name, store in self._tiers().items():
            store.settle()
            found[name] = {"bytes": store.nbytes, "memory": store.buffers, **asdict(store.traffic)}
        if self.transfer is not None:
            found["gradients"]["memory"] += self.transfer.memory
            found["gradients"]["read"] += self.transfer.sent
        return found

    def elsewhere(self) -> dict[str, int]:
        """Bytes of parameters, states and gradients that are off the device, by what and where."""
        names = {"params": "parameters"}
        return {
            f"{names.get(name, name)}_{'host' if store.in_memory else 'files'}": store.nbytes
            for name, store in self._tiers().items()
        }

    def _tiers(self) -> dict[str, Store]:
        tiers = {"states": self.store, "params": self.parameters, "gradients": self.gradients}
        return {name: store for name, store in tiers.items() if store is not None}
