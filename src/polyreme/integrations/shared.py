"""The common code of the integrations: completes a config with another library's settings, tells which ranks
have the same data, and has an optimizer whose step is the engine's own."""

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
"""The forms in which a config may be given."""


def is_given(config: Config, key: str) -> bool:
    """Whether the config's author wrote this key."""
    section, _, name = key.rpartition(".")
    owner = getattr(config, section) if section else config
    return section in {"", *config.model_fields_set} and name in owner.model_fields_set


def completed(config: Config, settings: Mapping[str, tuple[Any, str]]) -> Config:
    """Return the config with another library's settings: by key, the value and the name of its argument
    there. Raises ConfigError for keys that the config has with another value."""
    problems = [
        Problem(
            key, config.value(key), f"{where} says {value!r}", "remove it from the config, or say the same"
        )
        for key, (value, where) in settings.items()
        if is_given(config, key) and config.value(key) != value
    ]
    if problems:
        raise ConfigError(problems)
    missing = {key: value for key, (value, _) in settings.items() if not is_given(config, key)}
    return Config.load(config, [f"{key}={json.dumps(value)}" for key, value in missing.items()])


def data_parallel(config: Config, world_size: int) -> int:
    """Return the number of data-parallel ranks. Raises ConfigError where the other axes do not divide
    `world_size`, and where a search would choose them later."""
    if left := [key for key in config.searched if key.startswith("mesh.")]:
        reason, fix = (
            "data are shared out before it is chosen",
            "write a number, such as `polyreme plan` finds",
        )
        raise ConfigError([Problem(key, "auto", reason, fix) for key in left])
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
    """Return the rank on the data-parallel axis of the global rank `rank`."""
    sizes = {name: getattr(config.mesh, name) for name in ("tp", "pp", "cp", "ep")}
    sizes["dp"] = data_parallel(config, world_size)
    return next(line.index(rank) for line in lines(sizes, config.mesh.order, "dp") if rank in line)


class EngineOptimizer(OptimizerView):
    """The engine's optimizer for another library's loop, which calls `step` after the engine has made its
    step. last: the result of the last step."""

    def __init__(self, engine: Engine) -> None:
        own = engine.optimizer
        super().__init__(own._engine, own._shown)
        self.last: StepResult | None = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, so that it changed no weights."""
        return self.last is not None and self.last.skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has made the step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine drops gradients after its step."""
