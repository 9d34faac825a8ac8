"""Files of torch.save by DeepSpeed's interface. No checkpoint of the engine's is written through it."""

from __future__ import annotations

from typing import Any

import torch

from polyreme.compat.deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)


class TorchCheckpointEngine(CheckpointEngine):
    """Invariant: what is loaded is tensors and plain values; a pickled object is an error of torch's."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location, weights_only=True)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Whether the checkpoint is complete: it is, when the last `save` has returned."""
        return True
