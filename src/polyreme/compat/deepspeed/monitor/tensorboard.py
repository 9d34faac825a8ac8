"""Figures for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.monitor.base import Event, Monitor, package


class TensorBoardMonitor(Monitor):
    """Writes into `output_path/job_name`. Raises MissingPackageError without tensorboard."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        package("tensorboard", "tensorboard")
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.summary_writer: Any = None
        if self.writes():
            self.get_summary_writer()

    def get_summary_writer(self) -> Any:
        """What writes, on the first rank."""
        if self.writes() and self.summary_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.summary_writer = SummaryWriter(str(Path(self.output_path) / self.job_name))
        return self.summary_writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        if self.summary_writer is not None:
            for event in event_list:
                self.summary_writer.add_scalar(*event)
            if flush:
                self.flush()

    def flush(self) -> None:
        """Have all that was written on the disk."""
        if self.summary_writer is not None:
            self.summary_writer.flush()
