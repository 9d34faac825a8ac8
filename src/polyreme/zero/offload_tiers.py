"""The tiers of one engine: which store has what of its buckets off the device.

Communication: where any of it is in host memory, one exchange of what ranks need there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from polyreme.layout.intervals import Interval
from polyreme.offload.gradients import OffloadedGradients
from polyreme.offload.host import pools, refuse_more
from polyreme.offload.host_transfer import HostTransfer
from polyreme.offload.optimizer_states import OffloadedStates
from polyreme.offload.store import Store
from polyreme.optim.quantized_states import States
from polyreme.zero.bucket_gradients import Microbatches


class OffloadTiers:
    """What is not in the device's memory: masters and states of `share` of all elements, as near as whole
    buckets come to it, which are in `store` (`compact`: see OffloadedStates), from which the CPU updates
    them, and reaches the device by `transfer`; their `gradients`, where those do not stay; and the shards of
    all `parameters`, where they do not."""

    def __init__(
        self,
        store: Store | None = None,
        share: float = 1.0,
        parameters: Store | None = None,
        compact: States | None = None,
        transfer: HostTransfer | None = None,
        gradients: Store | None = None,
        gather: Callable[[object], list[Any]] = lambda value: [value],
    ) -> None:
        """`gather` returns what every rank gives; all ranks have tiers of the same kinds."""
        self.store, self.parameters, self.compact = store, parameters, compact
        self.transfer, self.gradients, self._share = transfer, gradients, share
        self._gather, self._seen, self._taken = gather, 0, 0

    def next(self, elements: int) -> Store | None:
        """The home of the states of the next bucket, of so many elements; None: the device."""
        self._seen += elements
        if self.store is None or self._taken + elements / 2 > self._share * self._seen:
            return None
        self._taken += elements
        return self.store

    def gradients_of(
        self, states: OffloadedStates, region: slice, dtype: torch.dtype, microbatches: Microbatches
    ) -> OffloadedGradients | None:
        """The reduced gradients of a bucket's `region`, whose offloaded states are `states`, where they do
        not stay."""
        if self.gradients is None:
            return None
        parts = [Interval(0, region.stop - region.start)]
        if not self.gradients.in_memory:
            intervals = [extent.interval for extent in states]
            parts = [Interval(each.start - region.start, each.stop - region.start) for each in intervals]
        return OffloadedGradients(self.gradients, parts, dtype, adds=microbatches == "left")

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
