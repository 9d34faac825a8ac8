"""DeepSpeed's monitors, which write the figures of a run to TensorBoard, to Weights & Biases and to files of
comma-separated values, on the first rank. Each has a config section, with the key `enabled`."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polyreme.errors import PolyremeError

Event = tuple[str, Any, int]
"""A figure's name, its value, and the number of samples that the run had taken by then."""


class MissingPackageError(PolyremeError, ImportError):
    """The error of a monitor whose package is not installed."""


class Monitor:
    """Writes figures somewhere: the arguments are a section of the config."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = monitor_config.enabled

    def writes(self) -> bool:
        """Return whether this process's figures are written."""
        return self.enabled and (not dist.is_initialized() or dist.get_rank() == 0)

    def _package(self, name: str, module: str) -> Any:
        """Return a module of a package. Raises MissingPackageError."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise MissingPackageError(
                f"the monitor {name} needs a package that is not installed: pip install {name}, or take the "
                f"section out of the config ({error})"
            ) from error

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write these figures."""
        raise NotImplementedError


class TensorBoardMonitor(Monitor):
    """A monitor that writes TensorBoard's files into `output_path/job_name`. Raises MissingPackageError if
    tensorboard is not installed."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        writer = self._package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        folder = Path(tensorboard_config.output_path) / tensorboard_config.job_name
        self.summary_writer: Any = writer(str(folder)) if self.writes() else None

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        if self.summary_writer is not None:
            for name, value, samples, *_ in event_list:
                self.summary_writer.add_scalar(name, value, samples)
            if flush:
                self.summary_writer.flush()


class WandbMonitor(Monitor):
    """A monitor that writes to a project of Weights & Biases. Raises MissingPackageError if wandb is not
    installed."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self._wandb = self._package("wandb", "wandb")
        if self.writes():
            self._wandb.init(project=wandb_config.project, group=wandb_config.group, entity=wandb_config.team)

    def log(self, data: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the figures of one step, by name."""
        if self.writes():
            self._wandb.log(data, step=step, **kwargs)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, step, *_ in event_list:
            self.log({name: value}, step)


class csvMonitor(Monitor):
    """A monitor that appends the values of each figure to a file of its name in `output_path/job_name`. In
    the file's name `_` stands for slashes and spaces."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self._begun: set[str] = set()
        self.log_dir = Path(csv_config.output_path) / csv_config.job_name
        if self.writes():
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, step, *_ in event_list if self.writes() else ():
            filename = name.replace("/", "_").replace(" ", "_")
            with (self.log_dir / f"{filename}.csv").open("a", newline="") as file:
                writer = csv.writer(file)
                if name not in self._begun:
                    self._begun.add(name)
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])


class MonitorMaster(Monitor):
    """A monitor that writes to each of the others that its config enables."""

    comet_monitor = None

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        names = {"tensorboard": TensorBoardMonitor, "wandb": WandbMonitor, "csv_monitor": csvMonitor}
        sections = [(kind, getattr(monitor_config, name)) for name, kind in names.items()]
        self._all: list[Any] = [
            kind(section) if section.enabled and self.writes() else None for kind, section in sections
        ]
        self.tb_monitor, self.wandb_monitor, self.csv_monitor = self._all

    def write_events(self, event_list: Sequence[Event]) -> None:
        for each in filter(None, self._all):
            each.write_events(event_list)
