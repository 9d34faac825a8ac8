"""Figures for Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.compat.deepspeed.monitor.base import Event, Monitor, package


class WandbMonitor(Monitor):
    """Writes to a project of a team. Raises MissingPackageError without wandb."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self._wandb = package("wandb", "wandb")
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        if self.writes():
            self._wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write figures of one step."""
        if self.writes():
            self._wandb.log(data, step=step, **kwargs)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, step, *_ in event_list:
            self.log({name: value}, step)
