"""Figures in files of comma-separated values: one file each, of steps and values."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.monitor.base import Event, Monitor


class csvMonitor(Monitor):
    """Writes into `output_path/job_name`, appending. A figure's file has its name with `_` in place of what a
    file's name may not have."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.filenames: list[str] = []
        self.log_dir = Path(self.output_path) / self.job_name
        if self.writes():
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        if not self.writes():
            return
        for name, value, step, *_ in event_list:
            filename = name.replace("/", "_").replace(" ", "_")
            with (self.log_dir / f"{filename}.csv").open("a", newline="") as file:
                writer = csv.writer(file)
                if filename not in self.filenames:
                    self.filenames.append(filename)
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])
