"""What decides where a model lies, beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from polyreme.config.schema import MemorySection, ZeroSection, is_files, tiers_of
from polyreme.offload.host_transfer import is_at_hand
from polyreme.optim.quantized_states import States
from polyreme.zero.formats import Formats
from polyreme.zero.gradient_sums import Accumulation


@dataclass(frozen=True)
class PlacementSettings:
    """How a model is divided and placed, on `device`.

    blocks: how pipeline stages share the blocks out, or how many each has. sample: samples of a micro-batch
    by which blocks are measured, and tokens of each. tp_plan, sequence_parallel: how tensor parallelism
    divides modules. zero: what is kept whole, over which ranks, and in buckets of which sizes. memory: where
    what is kept is. formats: of what is trained. accumulation: how micro-batches are added up. compact:
    how optimizer states are kept, if not as torch does."""

    device: torch.device
    formats: Formats
    zero: ZeroSection
    memory: MemorySection
    accumulation: Accumulation
    compact: States | None = None
    blocks: Literal["work", "parameters", "time"] | Sequence[int] = "work"
    sample: tuple[int, int] = (1, 1)
    tp_plan: Mapping[str, str] | None = None
    sequence_parallel: bool = False

    @property
    def gradients_leave(self) -> bool:
        """Whether reduced gradients of what has its states in a store go to one, too."""
        states, _ = tiers_of(self.memory.states)
        reduced, _ = tiers_of(self.memory.gradients)
        return is_files(reduced) or (not is_at_hand(self.device) and states != ["device"])
