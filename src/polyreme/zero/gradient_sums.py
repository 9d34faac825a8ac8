"""The ways to sum the gradients of a step's micro-batches: whole on the rank until one reduction, reduced one
by one, or in a store. Each says which memory gradients take, and when it is taken and freed.

Invariant: a way is a value. A bucket changes to another one where its steps get several micro-batches
(`BucketGradients.make_room`), or where a step is extended (`BucketGradients.keep_adding`). No
communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from polyreme.distributed.mesh import Axis
from polyreme.offload.gradients import OffloadedGradients
from polyreme.zero.residency import Residency


@dataclass(frozen=True)
class Accumulation:
    """The way in which all buckets of an engine sum gradients, where they can: whole, reduced or in a store;
    and the dtypes on this rank before the reduction (`local`) and after it (`reduce`)."""

    how: Literal["whole", "reduced", "stored"]
    local: torch.dtype
    """Wider than the parameters' dtype where several micro-batches are summed before the reduction."""
    reduce: torch.dtype
    several: bool = True
    """True if there is room for several micro-batches."""

    def of(self, residency: Residency, axis: Axis, store: OffloadedGradients | None) -> GradientSum:
        """Return the way of a bucket on its axis, with a store or without."""
        offloaded = store is not None
        if self.how == "whole":
            sharded = residency.grads == "shard"
            apart = sharded or self.local != self.reduce
            return WholeSum(
                self.local, self.reduce, store, self.several, False, not apart, sharded or offloaded
            )
        if self.how == "stored" and offloaded:
            return StoredSum(self.local, self.reduce, store, in_place=axis.size == 1)
        return ReducedSum(self.local, self.reduce, store)


@dataclass(frozen=True)
class GradientSum:
    """The way in which one bucket sums its gradients: one of the three below."""

    local: torch.dtype
    reduce: torch.dtype
    store: OffloadedGradients | None
    """The store for reduced gradients, if they do not stay on the device."""
    several: bool = True
    """True if there is room for several micro-batches."""
    reduces_each: bool = True
    """True if each micro-batch is reduced by itself."""
    in_place: bool = False
    """True if reduced gradients lie in the buffer of the unreduced ones."""
    frees: bool = True
    """True if the buffer of unreduced gradients is freed after the reduction."""

    @property
    def leaves(self) -> bool:
        """True if each reduction moves its result to the store."""
        return self.store is not None and not isinstance(self, ReducedSum)

    @property
    def comes(self) -> bool:
        """True if each backward takes a new buffer for unreduced gradients."""
        return self.frees and not (isinstance(self, WholeSum) and self.several)


class WholeSum(GradientSum):
    """Sums on the rank, before the one reduction of a step."""


class ReducedSum(GradientSum):
    """Sums of reduced gradients on the device; a store, if there is one, gets the sum of a step."""


class StoredSum(GradientSum):
    """Sums of reduced gradients in host memory or files, to which each micro-batch's are added."""
