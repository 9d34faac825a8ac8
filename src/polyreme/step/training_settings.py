"""The settings of a training, beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.config.schema import (
    CheckpointSection,
    LRScheduleSection,
    OptimizerSection,
    PrecisionSection,
    SentinelsSection,
    ZeroSection,
)
from polyreme.models.buffers import BufferSettings
from polyreme.pipeline.rank import PipelineRank
from polyreme.step.batch.batches import Batches
from polyreme.zero.gradient_sums import Accumulation


@dataclass(frozen=True)
class TrainingSettings:
    """Settings that hold for a whole engine, whatever becomes of its model.

    batches: how global batches are cut. pipeline: returns this rank's place in the pipeline for the batches
    as they are cut now. several: how gradients of several micro-batches are summed, also in steps that
    expected one. reduces_each: whether the gradients of each micro-batch are reduced by themselves. order: of
    the mesh's axes. config_values: returns every config key with its value, for checkpoints."""

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
    sentinels: SentinelsSection
    buffers: BufferSettings
    config_values: Callable[[], dict[str, Any]]
