"""The destinations of training's numbers: the terminal, a log file, TensorBoard, Weights & Biases, MLflow.

Invariant: no monitor can end training. One that raises is dropped, with one message to those that remain."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyreme.errors import ConfigError, Problem
from polyreme.monitor.console import Console
from polyreme.monitor.jsonl import JSONL, LOG_NAME, read_log
from polyreme.monitor.record import Monitor, Record, Run
from polyreme.monitor.trackers import MLflow, TensorBoard, WandB

if TYPE_CHECKING:
    from polyreme.config.schema import MonitorSection

__all__ = ["LOG_NAME", "FanOut", "Monitor", "Record", "Run", "open_monitors", "read_log"]


class FanOut:
    """A monitor that passes everything to several others. Their errors end here."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)

    def start(self, run: Run) -> None:
        self._each(lambda monitor: monitor.start(run))

    def log(self, record: Record) -> None:
        self._each(lambda monitor: monitor.log(record))

    def message(self, text: str) -> None:
        self._each(lambda monitor: monitor.message(text))

    def close(self, summary: Mapping[str, object]) -> None:
        """Close every monitor; a second call does nothing."""
        self._each(lambda monitor: monitor.close(summary))
        self._monitors.clear()

    def _each(self, call: Callable[[Monitor], None]) -> None:
        for monitor in tuple(self._monitors):
            if monitor in self._monitors:  # reporting one failure may have dropped another
                try:
                    call(monitor)
                except Exception as error:
                    self._drop(monitor, error)

    def _drop(self, monitor: Monitor, error: Exception) -> None:
        self._monitors.remove(monitor)
        with contextlib.suppress(Exception):
            monitor.close({})
        text = (
            f"monitor {type(monitor).__name__} stopped "
            f"({type(error).__name__}: {error}); training goes on without it"
        )
        if not any(isinstance(other, Console) for other in self._monitors):
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr)
        self.message(text)


def open_monitors(section: MonitorSection, folder: Path) -> Monitor:
    """Return the monitors that `section` of the config asks for, as one, writing into `folder`. For rank 0
    only.

    Raises `ConfigError` naming every service whose package cannot be imported."""
    monitors: list[Monitor] = []
    problems: list[Problem] = []
    if section.console:
        monitors.append(Console(section.every))
    if section.jsonl:
        monitors.append(JSONL(folder))
    services: dict[str, Callable[[Path, str], Monitor]] = {
        "tensorboard": TensorBoard,
        "wandb": WandB,
        "mlflow": MLflow,
    }
    for name, service in services.items():
        if getattr(section, name):
            try:
                monitors.append(service(folder, section.project))
            except Exception as error:
                problems.append(
                    Problem(
                        f"monitor.{name}",
                        True,
                        f"its package cannot be imported ({type(error).__name__}: {error})",
                        f"pip install {name}, or set monitor.{name} = false",
                    )
                )
    if problems:
        raise ConfigError(problems)
    return FanOut(monitors)
