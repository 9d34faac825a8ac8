"""All units and buckets that this rank has of a model.

Communication: whole tensors are gathered from the ranks that have slices of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.layout.bucket_layout import Slot
from polyreme.models.tensor_access import entries
from polyreme.placement.dividing import Division
from polyreme.zero.bucket import Bucket
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.gather import Unit
from polyreme.zero.offload_tiers import OffloadTiers


@dataclass(frozen=True, eq=False)
class Placement:
    """All units and buckets that this rank has of a model."""

    root: Unit
    units: Sequence[Unit]
    pool: Pool
    division: Division
    offload: OffloadTiers

    @cached_property
    def buckets(self) -> Sequence[Bucket]:
        """Every bucket, the root's first."""
        return [bucket for unit in (self.root, *self.units) for bucket in unit.buckets]

    @cached_property
    def trainable(self) -> Sequence[Bucket]:
        """The buckets that are updated, in the order in which their parameters were registered."""
        return sorted((bucket for bucket in self.buckets if bucket.trainable), key=lambda b: b.spec.at)

    @cached_property
    def where(self) -> Mapping[str, tuple[Bucket, Slot]]:
        """The bucket and slot of each parameter, by any of its names."""
        return {name: (b, slot) for b in self.buckets for names, slot in self.named(b) for name in names}

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.pool.device

    @property
    def unchanged(self) -> set[int]:
        """Ids of the parameters that still have the shape with which they were placed."""
        pairs = (
            (p, slot)
            for bucket in self.buckets
            for p, slot in zip(bucket.parameters, bucket.layout.slots, strict=True)
        )
        return {id(parameter) for parameter, slot in pairs if tuple(parameter.shape) == slot.shape}

    def publish(self) -> None:
        """Send this rank's changed parameters to the other ranks."""
        for work in [bucket.publish() for bucket in self.buckets]:
            work.settle()

    def write(self, name: str, whole: Tensor) -> None:
        """Set a parameter to `whole`, of which this rank keeps its slice, or its shard of that."""
        bucket, slot = self.where[name]
        bucket.write(slot, self.division.local(name, whole))

    def tensors(
        self, master: bool = False, among: Collection[str] | None = None
    ) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield every parameter of the whole model, whole, with all its names; each is valid until the next.
        All ranks must call. among: names; buckets without any of these are left out."""
        return self._joined(
            self.holding(among),
            lambda b: b.whole(master),
            lambda b: b.formats.master if master else b.formats.compute,
        )

    def holding(self, among: Collection[str] | None) -> list[Bucket]:
        """Return this rank's buckets that have any of these names, or all buckets."""
        return [
            b
            for b in self.buckets
            if among is None or any(name in among for names, _ in self.named(b) for name in names)
        ]

    def gradients(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield every reduced gradient, whole, as `tensors` does."""
        return self._joined(
            self.trainable,
            lambda bucket: bucket.gradients.whole(),
            lambda bucket: bucket.gradients.sums.reduce,
        )

    def _joined(
        self,
        buckets: Sequence[Bucket],
        whole: Callable[[Bucket], Tensor],
        dtype_of: Callable[[Bucket], torch.dtype],
    ) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield the tensors of all stages, whole. `whole` returns a bucket's, of the dtype that `dtype_of`
        returns."""
        if self.division.pp.size == 1:
            yield from self._of_stage(buckets, whole)
            return
        mine = [
            (names, list(self.division.parameters[names[0]].cut.shape), str(dtype_of(b)))
            for b in buckets
            for names, _ in self.named(b)
        ]
        yield from self._of_all_stages(mine, self._of_stage(buckets, whole))

    def buffers(self, model: nn.Module) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield every persistent buffer of the whole model, by each of its names, from the first stage that
        uses it. All ranks must call."""
        persistent = entries(model).keys()
        found = [
            ([name], buffer)
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name in persistent
        ]
        if self.division.pp.size == 1:
            yield from found
            return
        found = [(names, buffer) for names, buffer in found if self.division.computes(names[0])]
        yield from self._of_all_stages(
            [(names, list(buffer.shape), str(buffer.dtype)) for names, buffer in found], iter(found)
        )

    def _of_all_stages(
        self, mine: list[tuple[Sequence[str], list[int], str]], own: Iterator[tuple[Sequence[str], Tensor]]
    ) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield the tensors of all stages, each once. `mine` has names, shapes and dtypes of this stage's,
        which `own` yields."""
        pp = self.division.pp
        gathered: list[Any] = pp.gather_objects(mine)
        known: set[str] = set()
        for rank, theirs in enumerate(gathered):
            for names, shape, dtype in theirs:
                local = next(own) if rank == pp.rank else None
                if names[0] in known:
                    continue
                known.update(names)
                tensor = (
                    local[1].contiguous()
                    if local
                    else torch.empty(
                        shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self.device
                    )
                )
                pp.broadcast(tensor, rank)
                yield names, tensor

    def _of_stage(
        self, buckets: Sequence[Bucket], whole: Callable[[Bucket], Tensor]
    ) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield the tensors of this rank's stages, joined over tensor parallelism, with one bucket in memory
        at a time."""
        for bucket in buckets:
            full = whole(bucket)
            for names, slot in self.named(bucket):
                yield names, self.joined(slot, full[slot.start : slot.stop])

    def joined(self, slot: Slot, local: Tensor) -> Tensor:
        """Return the whole of a tensor, of which `local`, flat, is this rank's slice. All ranks that it is
        divided over must call."""
        over, cut = self.division.over(slot.name), self.division.parameters[slot.name].cut
        if cut.is_whole or over.size == 1:
            return local.view(slot.shape)
        return cut.join([shard.view(slot.shape) for shard in over.gathered(local).chunk(over.size)])

    def named(self, bucket: Bucket) -> list[tuple[Sequence[str], Slot]]:
        """Return all names of each of the bucket's tensors, in the order of its layout."""
        return list(zip(bucket.spec.names, bucket.layout.slots, strict=True))
