"""A ZeRO stage as a value: whether a rank holds parameters, gradients and optimizer states whole or only its
shard.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FullOrShard = Literal["full", "shard"]


@dataclass(frozen=True)
class Residency:
    """Which of a bucket's parameters, gradients and states each rank keeps whole between their uses, and of
    which it keeps a shard."""

    params: FullOrShard
    grads: FullOrShard
    states: FullOrShard

    @classmethod
    def of_stage(cls, stage: int) -> Residency:
        """Return the residency of a ZeRO stage. 0: everything whole. 1: states in shards. 2: gradients too.
        3: parameters too."""
        return cls(
            params="shard" if stage >= 3 else "full",
            grads="shard" if stage >= 2 else "full",
            states="shard" if stage >= 1 else "full",
        )
