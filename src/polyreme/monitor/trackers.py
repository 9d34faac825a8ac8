"""TensorBoard, Weights & Biases and MLflow, each when its package is installed.

Invariant: the packages are imported when a monitor is made, never before, and every file goes into the run's
folder unless the user's own settings of the service say otherwise."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyreme.monitor.record import Record, Run, plain, scalars


class TensorBoard:
    """Writes TensorBoard events to `folder`/tensorboard."""

    def __init__(self, folder: Path, project: str) -> None:
        self._summary_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder / "tensorboard"

    def start(self, run: Run) -> None:
        # A resumed run hides the steps that it is going to do again.
        purge = run.step + 1 if run.step else None
        self._writer = self._summary_writer(str(self._folder), purge_step=purge, flush_secs=10)
        text = json.dumps(plain(dataclasses.asdict(run)), indent=2)
        self._writer.add_text("run", "\n".join(f"    {line}" for line in text.splitlines()), run.step)

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def message(self, text: str) -> None:
        pass  # has no place for text that belongs to no step

    def close(self, summary: Mapping[str, object]) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases named after `folder`. `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, folder: Path, project: str) -> None:
        self._wandb = importlib.import_module("wandb")
        self._folder, self._project = folder, project

    def start(self, run: Run) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=self._project,
            name=self._folder.resolve().name,
            dir=str(self._folder),
            config=plain(dataclasses.asdict(run)),
        )

    def log(self, record: Record) -> None:
        self._run.log(scalars(record), step=record.step)

    def message(self, text: str) -> None:
        pass  # the service keeps the terminal's output itself

    def close(self, summary: Mapping[str, object]) -> None:
        self._run.summary.update(plain(summary))
        self._run.finish()


class MLflow:
    """A run of MLflow named after `folder`, in a database in that folder unless a tracking server is set."""

    def __init__(self, folder: Path, project: str) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._folder, self._project = folder, project

    def start(self, run: Run) -> None:
        if not self._mlflow.is_tracking_uri_set():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._mlflow.set_tracking_uri(f"sqlite:///{(self._folder / 'mlflow.db').resolve().as_posix()}")
        self._mlflow.set_experiment(self._project)
        self._mlflow.start_run(run_name=self._folder.resolve().name)
        parameters = dict(_leaves(plain(dataclasses.asdict(run))))
        names = list(parameters)
        for at in range(0, len(names), 100):  # the most that one request may carry
            self._mlflow.log_params({name: parameters[name] for name in names[at : at + 100]})

    def log(self, record: Record) -> None:
        self._mlflow.log_metrics(scalars(record), step=record.step)

    def message(self, text: str) -> None:
        pass  # has no place for text that belongs to no step

    def close(self, summary: Mapping[str, object]) -> None:
        self._mlflow.set_tags({f"summary.{name}": str(value) for name, value in summary.items()})
        self._mlflow.end_run()


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and values as text, no longer than MLflow takes."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)[:500]
