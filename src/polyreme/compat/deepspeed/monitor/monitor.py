"""All monitors of a config together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.compat.deepspeed.monitor.base import Event, Monitor, first_rank
from polyreme.compat.deepspeed.monitor.comet import CometMonitor
from polyreme.compat.deepspeed.monitor.csv_monitor import csvMonitor
from polyreme.compat.deepspeed.monitor.tensorboard import TensorBoardMonitor
from polyreme.compat.deepspeed.monitor.wandb import WandbMonitor

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]


class MonitorMaster(Monitor):
    """Writes to each monitor that its config enables, on the first rank."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)

        def made(kind: Any, section: Any) -> Any:
            return kind(section) if section.enabled and first_rank() else None

        self.tb_monitor = made(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = made(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = made(csvMonitor, monitor_config.csv_monitor)
        self.comet_monitor = made(CometMonitor, monitor_config.comet)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for each in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if each is not None:
                each.write_events(event_list)
