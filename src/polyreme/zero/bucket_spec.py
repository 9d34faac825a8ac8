"""The description of a bucket before it has memory.

Invariant: a spec never changes, and the ranks of the axis have equal ones but for `counted`. Communication:
none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.layout.bucket_layout import BucketLayout
from polyreme.layout.region import StridedRange
from polyreme.zero.gradient_sums import Accumulation
from polyreme.zero.residency import Residency

Offloaded = Literal["states", "params", "gradients"]
"""Contents of a bucket that are in a store: masters and optimizer states, the parameter shard, reduced
gradients."""


@dataclass(frozen=True)
class Formats:
    """Number formats of a bucket: of parameters in the model, and of the optimizer's copy."""

    compute: torch.dtype
    master: torch.dtype
    quantized: bool = False
    """True if forwards and backwards gather parameters in one byte a number instead of exactly."""


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """The parameters of one bucket: of one dtype, all trainable or all frozen.

    names: all names of each parameter, in the order of `layout`, whose slots have the first ones. axis: the
    ranks that hold replicas of them, over which they are sharded and their gradients are summed.
    accumulation: how micro-batches of a step are summed; None where nothing is trained. stages: the pipeline
    stages that use the bucket. tie: the pipeline ranks that have a copy of it, if others do. counted: which
    numbers of this rank enter a sum over all ranks of the model: all, none, or those that no other rank
    holds, as ranges that begin at an element of the flat buffer. at: the position of its first parameter in
    the order of registration."""

    layout: BucketLayout
    names: Sequence[Sequence[str]]
    axis: Axis
    residency: Residency
    formats: Formats
    accumulation: Accumulation | None = None
    offloaded: Collection[Offloaded] = ()
    stages: tuple[int, ...] = (0,)
    tie: Axis | None = None
    counted: bool | Sequence[tuple[int, StridedRange]] = True
    at: int = 0

    @property
    def trainable(self) -> bool:
        """True if an optimizer updates the bucket."""
        return self.accumulation is not None

    @property
    def own(self) -> slice:
        """This rank's shard of the flat buffer."""
        return slice(*self.layout.shard(self.axis.rank))

    @property
    def region(self) -> slice:
        """The elements of the flat buffer whose optimizer states this rank holds: all at stage 0, its shard
        otherwise."""
        return slice(0, self.layout.size) if self.residency.states == "full" else self.own

    def mask(self, device: torch.device) -> bool | Tensor:
        """Return `counted` for this rank's shard: a bool, or a flat tensor of ones and zeros in the reduce
        dtype."""
        if isinstance(self.counted, bool) or self.accumulation is None:
            return self.counted is True
        mask = torch.zeros(self.layout.size, dtype=self.accumulation.reduce)
        for start, strided in self.counted:
            strided.of(mask[start:]).fill_(1)
        return mask[self.own].to(device)
