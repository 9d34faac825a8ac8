"""The three services: TensorBoard's own reader reads our events; the others are stood in for by small
modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polyreme.config import Config
from polyreme.monitor import Monitor, Record, Run, open_monitors
from polyreme.monitor.record import scalars

CONFIG = {
    "optimizer": {"lr": 0.1, "betas": (0.9, 0.95)},
    "data": {"path": Path("corpus")},
    "seed": 0,
    "empty": {},
}
RUN = Run(model="Llama", parameters=10, ranks=2, stage=2, dtype="fp32", steps=10, config=CONFIG)


def record(step: int, **changes: Any) -> Record:
    return Record(
        step=step,
        samples=4 * step,
        tokens=64 * step,
        loss=2.5,
        grad_norm=1.5,
        lr=0.1,
        tokens_per_second=5.0,
        seconds=1.0,
        memory_bytes={"states": 8},
        traffic={"dp": {"reduce_scatter": (3, 96)}},
        **changes,
    )


def only(service: str, folder: Path) -> Monitor:
    section = {"console": False, "jsonl": False, service: True, "project": "oars"}
    return open_monitors(Config.load({"monitor": section}).monitor, folder)


def test_scalars_leave_out_what_was_not_measured() -> None:
    values = scalars(record(3))
    assert values == {
        "train/loss": 2.5,
        "train/grad_norm": 1.5,
        "train/lr": 0.1,
        "train/skipped": 0.0,
        "train/samples": 12.0,
        "train/tokens": 192.0,
        "speed/tokens_per_second": 5.0,
        "memory/states": 8.0,
        "traffic/dp/reduce_scatter_calls": 3.0,
        "traffic/dp/reduce_scatter_bytes": 96.0,
    }
    assert set(scalars(record(3, validation_loss=1.0, bits_per_byte=0.5, mfu=0.3, loss_scale=2.0))) - set(
        values
    ) == {"validation/loss", "validation/bits_per_byte", "speed/mfu", "train/loss_scale"}
    divided = {"method": "ring", "balance": "zigzag", "load": 1.5}
    assert scalars(record(3, context=divided)) == values | {"context/load": 1.5}


def test_tensorboard_reads_it_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, steps, loss in [(0, range(1, 5), 1.0), (2, range(3, 5), 9.0)]:  # the second is a resumed run
        monitor = only("tensorboard", tmp_path)
        monitor.start(
            Run(model="Llama", parameters=10, ranks=2, stage=2, dtype="fp32", step=start, config=CONFIG)
        )
        for step in steps:
            monitor.log(record(step, validation_loss=loss))
        monitor.message("heard by no one")
        monitor.close({})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("validation/loss")] == [1.0, 1.0, 9.0, 9.0]
    assert b'"path": "corpus"' in events.Tensors("run/text_summary")[0].tensor_proto.string_val[0]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)),
        summary=SimpleNamespace(update=lambda values: calls.append(("summary", values))),
        finish=lambda: calls.append("finish"),
    )
    module = ModuleType("wandb")
    monkeypatch.setattr(
        module, "init", lambda **options: calls.append(("init", options)) or fake, raising=False
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monitor = only("wandb", tmp_path / "first")
    assert calls == []
    monitor.start(RUN)
    monitor.log(record(1))
    monitor.close({"checkpoint": Path("run/step-1")})
    init, log, summary, finish = calls
    assert init[1]["project"] == "oars" and init[1]["name"] == "first" and Path(init[1]["dir"]).is_dir()
    assert init[1]["config"]["config"]["data"] == {"path": "corpus"} and init[1]["config"]["ranks"] == 2
    assert log == ("log", 1, scalars(record(1)))
    assert summary == ("summary", {"checkpoint": "run/step-1"}) and finish == "finish"


@pytest.mark.parametrize("server_is_set", [False, True])
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_is_set: bool) -> None:
    calls: list[Any] = []
    module = ModuleType("mlflow")
    for name in (
        "set_tracking_uri",
        "set_experiment",
        "start_run",
        "log_params",
        "log_metrics",
        "set_tags",
        "end_run",
    ):
        monkeypatch.setattr(
            module,
            name,
            lambda *args, _name=name, **options: calls.append((_name, *args, options)),
            raising=False,
        )
    monkeypatch.setattr(module, "is_tracking_uri_set", lambda: server_is_set, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    many = {f"key{i}": i for i in range(250)}
    monitor = only("mlflow", tmp_path / "first")
    monitor.start(Run(model="Llama", parameters=10, ranks=2, stage=2, dtype="fp32", config=CONFIG | many))
    monitor.log(record(1))
    monitor.close({"checkpoint": Path("run/step-1")})
    if not server_is_set:
        assert calls.pop(0)[1] == f"sqlite:///{(tmp_path / 'first' / 'mlflow.db').as_posix()}"
    assert calls[:2] == [("set_experiment", "oars", {}), ("start_run", {"run_name": "first"})]
    sent = [call[1] for call in calls if call[0] == "log_params"]
    assert all(len(batch) <= 100 for batch in sent)
    parameters = {name: value for batch in sent for name, value in batch.items()}
    assert parameters["config.optimizer.lr"] == "0.1" and parameters["config.data.path"] == "corpus"
    assert parameters["config.empty"] == "{}" and parameters["config.key249"] == "249"
    assert calls[-3:] == [
        ("log_metrics", scalars(record(1)), {"step": 1}),
        ("set_tags", {"summary.checkpoint": str(Path("run/step-1"))}, {}),
        ("end_run", {}),
    ]
