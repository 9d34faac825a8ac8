"""What the integrations have in common: a config completed by what another library was told, which ranks have
the same data, and an optimizer whose step is the engine's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme.config import Config
from polyreme.engine import Engine
from polyreme.errors import ConfigError, Problem
from polyreme.layout.mesh_axes import lines
from polyreme.step.step import StepResult
from polyreme.step.user.optimizer_view import OptimizerView

Source = str | Path | Mapping[str, Any] | Config
"""What a config may be given as."""


def is_given(config: Config, key: str) -> bool:
    """Whether whoever wrote the config wrote this key."""
    section, _, name = key.rpartition(".")
    owner = getattr(config, section) if section else config
    return section in {"", *config.model_fields_set} and name in owner.model_fields_set


def completed(config: Config, told: Mapping[str, tuple[Any, str]]) -> Config:
    """The config with the values that another library was told, by key: (value, where it was told). Raises
    ConfigError for each key that the config has with another value."""
    problems = [
        Problem(
            key, config.value(key), f"{where} says {value!r}", "remove it from the config, or say the same"
        )
        for key, (value, where) in told.items()
        if is_given(config, key) and config.value(key) != value
    ]
    if problems:
        raise ConfigError(problems)
    missing = {key: value for key, (value, _) in told.items() if not is_given(config, key)}
    return Config.load(config, [f"{key}={json.dumps(value)}" for key, value in missing.items()])


def data_parallel(config: Config, world_size: int) -> int:
    """How many ranks have data of their own. Raises ConfigError where `world_size` ranks cannot be divided
    so."""
    others = config.mesh.tp * config.mesh.pp * config.mesh.cp * config.mesh.ep
    if world_size % others:
        raise ConfigError(
            [
                Problem(
                    "mesh", others, f"{world_size} ranks are no multiple of tp x pp x cp x ep", "start others"
                )
            ]
        )
    return world_size // others


def data_rank(config: Config, world_size: int, rank: int) -> int:
    """The place of a rank on the axis of data parallelism."""
    sizes = {name: getattr(config.mesh, name) for name in ("tp", "pp", "cp", "ep")}
    sizes["dp"] = data_parallel(config, world_size)
    return next(line.index(rank) for line in lines(sizes, config.mesh.order, "dp") if rank in line)


class EngineOptimizer(OptimizerView):
    """The engine's optimizer for a loop of another library's, which calls `step` when the engine has made its
    step already, or with what makes it. `last` is what the last step did."""

    def __init__(self, engine: Engine) -> None:
        own = engine.optimizer
        super().__init__(own._engine, own._source)
        self.last: StepResult | None = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left the weights alone."""
        return self.last is not None and self.last.skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has made the step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine drops gradients after its step."""
