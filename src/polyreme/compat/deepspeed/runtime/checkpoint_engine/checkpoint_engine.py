"""What writes files of DeepSpeed's form, as an interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint is complete, where, and whether `latest` names it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes and reads objects of tensors by paths."""

    def __init__(self, config_params: Any = None) -> None:
        self.info: CheckpointCommitInfo | None = None

    def is_decoupled(self) -> bool:
        """Whether `save` returns before the file is complete."""
        return False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self.info = info

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None: ...

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any: ...

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make the folder `path`."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)
