"""A ZeRO stage is a value: which of parameters, gradients and optimizer states a rank holds whole, and which
only its shard of.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Extent = Literal["full", "shard"]


@dataclass(frozen=True)
class Residency:
    """What each rank keeps of a bucket between its uses."""

    params: Extent
    grads: Extent
    states: Extent

    @classmethod
    def of_stage(cls, stage: int) -> Residency:
        """Stage 0: everything whole. 1: states in shards. 2: gradients too. 3: parameters too."""
        return cls(
            params="shard" if stage >= 3 else "full",
            grads="shard" if stage >= 2 else "full",
            states="shard" if stage >= 1 else "full",
        )
