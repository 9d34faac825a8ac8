"""What of an engine outlives a refresh of its model: each `Training` gets it whole.

Communication: none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyreme.checkpoint.save import Saver
from polyreme.distributed.mesh import Mesh
from polyreme.sequence.context import ContextParallel
from polyreme.step.batch.loaders import Loaders
from polyreme.step.memory.activations import Activations
from polyreme.step.sentinels import Spikes
from polyreme.step.state.randomness import Randomness
from polyreme.step.training_settings import TrainingSettings
from polyreme.step.user.optimizer_view import ShownOptimizer


@dataclass(frozen=True)
class EngineContext:
    """optimizer, scheduler: as the user gave them. activations: sets the forwards of a model's blocks. saver:
    writes checkpoints. spikes: finds unusual losses and norms. sequences: divides them over mesh.cp; None
    where it is 1. shown: the optimizer as users see it."""

    settings: TrainingSettings
    mesh: Mesh
    optimizer: Any
    scheduler: Any
    randomness: Randomness
    activations: Activations
    saver: Saver
    loaders: Loaders
    spikes: Spikes
    sequences: ContextParallel | None = None
    shown: ShownOptimizer = field(default_factory=ShownOptimizer)
