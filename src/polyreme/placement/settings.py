"""The settings of a placement, beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from polyreme.config.schema import MemorySection, ZeroSection, is_files, tiers_of
from polyreme.offload.host_transfer import shares_cpu_memory
from polyreme.optim.quantized_states import States
from polyreme.zero.bucket_spec import Formats
from polyreme.zero.gradient_sums import Accumulation


@dataclass(frozen=True)
class PlacementSettings:
    """The settings by which a model is divided and placed, on `device`.

    blocks: how pipeline stages share the blocks, or how many each has. sample: samples of a micro-batch with
    which blocks are measured, and tokens of each. tp_plan, sequence_parallel: how tensor parallelism divides
    modules. zero: what is kept whole, over which ranks, and the sizes of buckets. memory: the tiers. formats:
    of trained parameters. accumulation: how micro-batches are summed. compact: the format of optimizer
    states, if not torch's."""

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
        """True if reduced gradients of buckets with states in a store go to a store, too."""
        states, _ = tiers_of(self.memory.states)
        reduced, _ = tiers_of(self.memory.gradients)
        return is_files(reduced) or (not shares_cpu_memory(self.device) and states != ["device"])
