"""What all monitors are."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from polyreme.errors import PolyremeError

Event = tuple[str, Any, int]
"""A figure's name, its value, and the number of samples after which it was."""


class MissingPackageError(PolyremeError, ImportError):
    """A monitor whose package is not installed."""


def package(name: str, pip: str) -> Any:
    """The package of this name. Raises MissingPackageError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"the monitor {name} needs a package that is not installed: pip install {pip}, or take the "
            f"section out of the config ({error})"
        ) from error


def first_rank() -> bool:
    """Whether this process is the one that writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


class Monitor(abc.ABC):
    """Writes figures somewhere, on the first rank, if its config is `enabled`."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled

    def writes(self) -> bool:
        """Whether this process's figures are written."""
        return self.enabled and first_rank()

    @abc.abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write figures."""
