"""Polyreme trains PyTorch models that are too big or too slow for one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyreme.distributed.torch_backends import add_mpi
from polyreme.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    ModelError,
    NumericsError,
    OrderError,
    OutOfMemoryError,
    PolyremeError,
    TierError,
    TransportError,
)
from polyreme.version import VERSION

if TYPE_CHECKING:
    from polyreme.config import Config
    from polyreme.engine import Engine, EvalResult, StepResult
    from polyreme.initialization import initialize
    from polyreme.planner.plan import plan
    from polyreme.verify import verify

add_mpi()
__version__ = VERSION
__all__ = [
    "BatchError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Engine",
    "EvalResult",
    "LaunchError",
    "ModelError",
    "NumericsError",
    "OrderError",
    "OutOfMemoryError",
    "PolyremeError",
    "StepResult",
    "TierError",
    "TransportError",
    "initialize",
    "plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first used, as torch takes seconds and `polyreme --help` does not need it;
    and the config once the command can answer Ctrl-C."""
    if name == "Config":
        from polyreme.config import Config

        return Config
    if name in ("Engine", "EvalResult", "StepResult"):
        from polyreme import engine

        return getattr(engine, name)
    if name == "initialize":
        from polyreme.initialization import initialize

        return initialize
    if name == "plan":
        from polyreme.planner.plan import plan

        return plan
    if name == "verify":
        return importlib.import_module("polyreme.verify")
    raise AttributeError(f"module 'polyreme' has no attribute {name!r}")
