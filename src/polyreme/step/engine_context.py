"""What an engine has from its beginning to its end, whatever becomes of its model: each `Training`, the first
one and those after a refresh, gets it whole.

Communication: none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyreme.checkpoint.save import Saver
from polyreme.distributed.mesh import Mesh
from polyreme.step.batch.loaders import Loaders
from polyreme.step.memory.activations import Activations
from polyreme.step.state.randomness import Randomness
from polyreme.step.training_settings import TrainingSettings
from polyreme.step.user.optimizer_view import Source


@dataclass(frozen=True)
class EngineContext:
    """optimizer, scheduler: what the user gave. activations: which of a model's blocks have their forwards
    set. saver: writes checkpoints. shown: the optimizer as users see it."""

    settings: TrainingSettings
    mesh: Mesh
    optimizer: Any
    scheduler: Any
    randomness: Randomness
    activations: Activations
    saver: Saver
    loaders: Loaders
    shown: Source = field(default_factory=Source)
