"""What DeepSpeed writes checkpoints by: torch's files; others are refused, as an engine writes its own
form."""

from polyreme.compat.deepspeed.refusal import absent
from polyreme.compat.deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from polyreme.compat.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

_WHY = "an engine's checkpoint is a Hugging Face directory, which it writes itself", "call save_checkpoint"
FastCheckpointEngine = absent("FastCheckpointEngine", *_WHY)
DecoupledCheckpointEngine = absent("DecoupledCheckpointEngine", *_WHY)
DataStatesCheckpointEngine = absent("DataStatesCheckpointEngine", *_WHY)

__all__ = [
    "CheckpointCommitInfo",
    "CheckpointEngine",
    "DataStatesCheckpointEngine",
    "DecoupledCheckpointEngine",
    "FastCheckpointEngine",
    "TorchCheckpointEngine",
]
