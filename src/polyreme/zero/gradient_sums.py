"""How the gradients of a step's micro-batches are summed: whole on the rank until one reduction, reduced as
they come, or in a store. Each way says which memory its gradients take, and when that comes and goes.

Invariant: a way is a value. A bucket goes on by another one where its steps get several micro-batches
(`BucketGradients.make_room`), or one is extended (`BucketGradients.keep_adding`). No communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from polyreme.distributed.mesh import Axis
from polyreme.offload.gradients import OffloadedGradients
from polyreme.zero.residency import Residency


@dataclass(frozen=True)
class Accumulation:
    """How all buckets of an engine sum their gradients, as far as they can: whole, reduced or in a store; and
    their formats on this rank before the reduction, and after it."""

    how: Literal["whole", "reduced", "stored"]
    local: torch.dtype
    """Wider than the parameters' where several micro-batches are summed before the reduction."""
    reduce: torch.dtype
    several: bool = True
    """Whether there is room for several micro-batches."""

    def of(self, residency: Residency, axis: Axis, store: OffloadedGradients | None) -> GradientSum:
        """The way of a bucket on its axis, with a store or without."""
        offloaded = store is not None
        if self.how == "whole":
            sharded = residency.grads == "shard"
            apart = sharded or self.local != self.reduce
            return Whole(self.local, self.reduce, store, self.several, False, not apart, sharded or offloaded)
        if self.how == "stored" and offloaded:
            return Stored(self.local, self.reduce, store, in_place=axis.size == 1)
        return Reduced(self.local, self.reduce, store)


@dataclass(frozen=True)
class GradientSum:
    """How one bucket sums its gradients: one of the three below."""

    local: torch.dtype
    reduce: torch.dtype
    store: OffloadedGradients | None
    """Where reduced gradients go, if they do not stay."""
    several: bool = True
    """Whether there is room for several micro-batches."""
    reduces_each: bool = True
    """Whether each of them is reduced."""
    in_place: bool = False
    """Whether reduced gradients are in the buffer of those before."""
    frees: bool = True
    """Whether the reduction gives that buffer back."""

    @property
    def leaves(self) -> bool:
        """Whether reduced gradients go to the store with each reduction."""
        return self.store is not None and not isinstance(self, Reduced)

    @property
    def comes(self) -> bool:
        """Whether each backward takes the buffer of unreduced gradients anew."""
        return self.frees and not (isinstance(self, Whole) and self.several)


class Whole(GradientSum):
    """On the rank, before the one reduction of a step."""


class Reduced(GradientSum):
    """As they are reduced, on the device; where there is a store, it gets the sum of a step."""


class Stored(GradientSum):
    """As they are reduced, in the store."""
