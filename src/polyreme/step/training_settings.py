"""What decides how a model is trained, beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.config.schema import (
    CheckpointSection,
    LRScheduleSection,
    OptimizerSection,
    PrecisionSection,
    ZeroSection,
)
from polyreme.models.buffers import BufferSettings
from polyreme.pipeline.rank import PipelineRank
from polyreme.step.batch.batches import Batches
from polyreme.zero.gradient_sums import Accumulation


@dataclass(frozen=True)
class TrainingSettings:
    """Of a whole engine, whatever becomes of its model.

    batches: how global ones are cut. pipeline: what this rank does for them as they are cut now. several: how
    gradients of several micro-batches are added up, in steps that were to have one, too; reduces_each:
    whether each one's are reduced. order: of the mesh's axes. written: all keys as checkpoints have them."""

    batches: Batches
    pipeline: Callable[[], PipelineRank]
    several: Accumulation
    reduces_each: bool
    seed: int
    order: Sequence[str]
    compiles: bool
    sequence_parallel: bool
    zero: ZeroSection
    optimizer: OptimizerSection
    lr_schedule: LRScheduleSection
    precision: PrecisionSection
    checkpoint: CheckpointSection
    buffers: BufferSettings
    written: Callable[[], dict[str, Any]]
