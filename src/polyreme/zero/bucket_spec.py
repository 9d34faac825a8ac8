"""What a bucket is, before it has memory.

Invariant: a spec is never changed, and ranks of the axis have equal ones but for what `counted` says.
Communication: none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.layout.bucket_layout import BucketLayout
from polyreme.layout.region import StridedRange
from polyreme.zero.formats import Formats
from polyreme.zero.gradient_sums import Accumulation
from polyreme.zero.residency import Residency

Offloaded = Literal["states", "params", "gradients"]
"""What of a bucket is in a store: masters and optimizer states, the shard of the parameters, reduced
gradients."""


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """The parameters of one bucket: of one dtype, all trainable or all frozen.

    names: all names of each of them, in the order of `layout`, whose slots have the first ones. axis: the
    ranks that hold replicas of them, over which they are sharded and their gradients are summed.
    accumulation: how micro-batches of a step are added up; None where nothing is trained. stages: those of
    the pipeline that use the bucket; tie: the ranks of the pipeline that have a copy of it, if others do.
    counted: which of this rank's numbers count in a sum over all ranks of the model: all, none, or (each in
    what begins at an element of the flat buffer) those that no other rank holds. at: where its first
    parameter comes in the order of registration."""

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
        """Whether an optimizer updates it."""
        return self.accumulation is not None

    @property
    def own(self) -> slice:
        """This rank's shard of the flat buffer."""
        return slice(*self.layout.shard(self.axis.rank))

    @property
    def region(self) -> slice:
        """The part of the flat buffer whose optimizer states this rank holds: everything at stage 0, its
        shard otherwise."""
        return slice(0, self.layout.size) if self.residency.states == "full" else self.own

    def mask(self, device: torch.device) -> bool | Tensor:
        """`counted` of this rank's shard: of some of its numbers a flat tensor of ones and zeros, of the
        reduce dtype."""
        if isinstance(self.counted, bool) or self.accumulation is None:
            return self.counted is True
        mask = torch.zeros(self.layout.size, dtype=self.accumulation.reduce)
        for start, strided in self.counted:
            strided.of(mask[start:]).fill_(1)
        return mask[self.own].to(device)
