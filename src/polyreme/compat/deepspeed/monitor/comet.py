"""Figures for Comet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.compat.deepspeed.monitor.base import Event, Monitor, package


class CometMonitor(Monitor):
    """Writes to an experiment, of each figure one in `samples_log_interval` samples. Raises
    MissingPackageError without comet_ml."""

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        comet, names = package("comet_ml", "'comet_ml>=3.41.0'"), comet_config
        self.samples_log_interval = names.samples_log_interval
        self._written: dict[str, int] = {}
        self._experiment: Any = None
        if self.writes():
            self._experiment = comet.start(
                api_key=names.api_key,
                project=names.project,
                workspace=names.workspace,
                experiment_key=names.experiment_key,
                mode=names.mode,
                online=names.online,
            )
            if names.experiment_name is not None:
                self._experiment.set_name(names.experiment_name)

    @property
    def experiment(self) -> Any:
        """Comet's, on the first rank."""
        return self._experiment

    def write_events(self, event_list: Sequence[Event]) -> None:
        if self._experiment is None:
            return
        for name, value, step, *_ in event_list:
            if name not in self._written or step - self._written[name] >= self.samples_log_interval:
                self._experiment.log_metric(name=name, value=value, step=step)
                self._written[name] = step
