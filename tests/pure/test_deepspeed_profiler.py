"""DeepSpeed's profiler of operations, and its monitors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.compat.deepspeed.monitor.config import get_monitor_config
from polyreme.compat.deepspeed.monitor.csv_monitor import csvMonitor
from polyreme.compat.deepspeed.monitor.monitor import MonitorMaster
from polyreme.compat.deepspeed.monitor.tensorboard import TensorBoardMonitor
from polyreme.compat.deepspeed.monitor.wandb import WandbMonitor
from polyreme.compat.deepspeed.profiling.flops_profiler import (
    FlopsProfiler,
    duration_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from polyreme.errors import PolyremeError


class Net(nn.Module):
    """A convolution, a pool and a layer, of 5 classes for images of 2 x 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.feature, self.pool, self.classes = nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.Linear(27, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.pool(self.feature(x)).flatten(1))


def test_a_model_has_operations_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    flops, macs, params = get_model_profile(Net(), (16, 2, 8, 8), as_string=False, print_profile=False)
    of_one = 6 * 6 * 3 * (2 * 9) + 27 * 5  # each output of the convolution: 9 products per input channel
    biases = pooled = 6 * 6 * 3
    assert macs == 16 * of_one and params == 3 * (2 * 9 + 1) + 5 * (27 + 1)
    assert flops == 2 * macs + 16 * (biases + pooled)
    assert capsys.readouterr().out == ""
    words = get_model_profile(Net(), (1, 2, 8, 8), print_profile=False)
    assert words == ("4.37 K", "2.08 KMACs", "197")


def test_modules_have_profiles_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    out = model(torch.ones(5, 3))
    model[0](torch.ones(1, 3))  # also what is called outside the model's forward
    profiler.stop_profile()
    model(torch.ones(5, 3))
    assert profiler.get_total_flops() == 2 * 5 * (3 * 4 + 4 * 2) + 5 * 4  # and ReLU
    assert profiler.get_total_macs(as_string=True) == "100 MACs"
    assert profiler.get_total_params() == 4 * 4 + 5 * 2 and profiler.get_total_duration() > 0
    profiler.print_model_profile(profile_step=7, top_modules=2)
    said = capsys.readouterr().out
    assert "Forwards of Sequential at step 7:" in said and "(0): Linear(16 = 61.54% Params, 72 MACs" in said
    assert "depth 1:" in said and "MACs        - {'Linear': '112 MACs', 'ReLU': '0 MACs'}" in said
    profiler.end_profile()
    out.sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(AssertionError, match="no profile"):
        profiler.get_total_flops()


def test_backward_is_not_counted_and_ignored_classes_have_no_numbers() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.ModuleDict])
    model["b"](model["a"](torch.ones(1, 2))).sum().backward()
    assert profiler.get_total_flops() == 16  # of a container that is never called: what is in it
    profiler.end_profile()


def test_attention_is_counted() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    x = torch.ones(1, 4, 8)
    flops, *_ = get_model_profile(attention, args=[x, x, x], as_string=False, print_profile=False)
    softmax = 2 * 4 * 4  # of two heads
    assert flops == 2 * 4 * 8 * 8 * 4 + 2 * 2 * 4 * 4 * 8 + softmax


def test_an_engine_adds_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lap = SimpleNamespace(elapsed=lambda reset: 500.0)
    engine = SimpleNamespace(
        wall_clock_breakdown=lambda: True, world_size=2, dp_world_size=2, mp_world_size=1,
        train_micro_batch_size_per_gpu=lambda: 3, timers=lambda name: lap,
    )  # fmt: skip
    model = nn.Linear(4, 4)
    profiler = FlopsProfiler(model, engine)
    profiler.start_profile()
    model(torch.ones(1, 4))
    profiler.print_model_profile(output_file=str(tmp_path / "folder" / "profile"), detailed=False)
    profiler.end_profile()
    said = (tmp_path / "folder" / "profile").read_text()
    assert "bwd FLOPS per GPU: " in said and "128 FLOPS" in said and "samples/second: " in said
    assert capsys.readouterr().out == "" and profiler.flops == 32


def test_numbers_have_units() -> None:
    assert [number_to_string(each) for each in (0, 812, 48213, 0.0037, 6e-6)] == [
        "0 ", "812 ", "48.21 K", "3.7 m", "6 u"]  # fmt: skip
    assert macs_to_string(48213, "G", 5) == "5e-05 GMACs" and params_to_string(1.5e9) == "1.5 B"
    assert duration_to_string(0.5) == "500 ms" and number_to_string(48213, "K") == "48.21 K"


def test_a_profile_needs_arguments() -> None:
    for bad in ({}, {"input_shape": [3]}, {"input_shape": (1,), "mode": "train"}):
        with pytest.raises(ValueError):
            get_model_profile(nn.Linear(1, 1), **bad)  # type: ignore[arg-type]


def config(folder: Path, **sections: Any) -> Any:
    place = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return get_monitor_config({name: {**place, **more} for name, more in sections.items()})


def test_figures_are_files_of_values(tmp_path: Path) -> None:
    monitor = csvMonitor(config(tmp_path, csv_monitor={}).csv_monitor)
    monitor.write_events([("Train/Samples/train loss", 0.5, 8), ("Train/lr", 0.1, 8)])
    monitor.write_events([("Train/Samples/train loss", 0.25, 16)])
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().split() == [
        "step,train", "loss", "8,0.5", "16,0.25"]  # fmt: skip
    assert (tmp_path / "job" / "Train_lr.csv").read_text().split() == ["step,lr", "8,0.1"]


def test_all_enabled_monitors_are_written_to(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    both = config(tmp_path, csv_monitor={}, tensorboard={"job_name": "board"})
    assert both.enabled and not get_monitor_config({}).enabled
    master = MonitorMaster(both)
    master.write_events([("loss", 1.0, 1)])
    assert master.wandb_monitor is None and isinstance(master.tb_monitor, TensorBoardMonitor)
    assert (tmp_path / "job" / "loss.csv").exists() and list((tmp_path / "board").glob("events*"))
    master.tb_monitor.summary_writer.close()


def test_a_monitor_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PolyremeError, match="pip install wandb"):
        WandbMonitor(SimpleNamespace(enabled=True, group=None, team=None, project="p"))


def test_wandb_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def note(name: str) -> Any:
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=note("init"), log=note("log")))
    master = MonitorMaster(get_monitor_config({"wandb": {"enabled": True, "project": "p"}}))
    for step in (0, 4, 10):
        master.write_events([("loss", 1.0, step)])
    assert [name for name, *_ in calls].count("log") == 3
    assert calls[0] == ("init", (), {"project": "p", "group": None, "entity": None})


def test_a_section_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="folder"):
        get_monitor_config({"csv_monitor": {"folder": "x"}})


F = nn.functional


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (F.gelu, [(3, 4)], 12),
        (F.leaky_relu, [(3, 4)], 12),
        (lambda x: F.softmax(x, -1), [(3, 4)], 12),
        (lambda x: F.layer_norm(x, (4,)), [(3, 4)], 4 * 12),
        (lambda x, w: F.layer_norm(x, (4,), w), [(3, 4), (4,)], 5 * 12),
        (lambda x, w: F.group_norm(x, 2, w), [(3, 4), (4,)], 5 * 12),
        (lambda x: F.instance_norm(x), [(1, 3, 4)], 4 * 12),
        (lambda x, m, v: F.batch_norm(x, m, v.abs()), [(3, 4), (4,), (4,)], 12),
        (lambda x, w: F.batch_norm(x, None, None, weight=w, training=True), [(3, 4), (4,)], 5 * 12),
        (lambda x: F.max_pool2d(x, 2), [(1, 4, 4)], 16),
        (lambda x: F.adaptive_avg_pool2d(x, 1), [(1, 4, 4)], 16),
        (lambda x: F.interpolate(x, scale_factor=2), [(1, 1, 4)], 8),
        (torch.mul, [(3, 1, 2), (1, 4, 2)], 24),
        (torch.add, [(6,), (3, 6)], 18),
        (lambda x: x + x * x, [(8,)], 0),  # as with DeepSpeed
        (F.linear, [(3, 5), (7, 5), (7,)], 2 * 3 * 5 * 7),
        (torch.addmm, [(6,), (2, 3), (3, 6)], 2 * 36 + 12),
        (torch.baddbmm, [(1, 1, 4), (3, 2, 5), (3, 5, 4)], 2 * 120 + 24),
        (F.conv1d, [(1, 2, 5), (3, 2, 3), (3,)], 2 * 9 * 2 * 3 + 9),
        (F.conv_transpose1d, [(1, 2, 5), (2, 3, 3), (3,)], 2 * 10 * 9 + 21),
    ],
)
def test_elementwise_functions_count(function: Any, shapes: list[tuple[int, ...]], flops: int) -> None:
    class Called(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return function(*inputs)

    inputs = [torch.randn(shape) for shape in shapes]
    assert get_model_profile(Called(), args=inputs, as_string=False, print_profile=False)[0] == flops


@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (nn.LSTM(4, 6, batch_first=True), (2, 5, 4), 5400),
        (
            nn.GRU(4, 6, 2, batch_first=True, bidirectional=True),
            (2, 5, 4),
            10 * 2 * ((360 + 42) + (648 + 42)),
        ),
        (nn.LSTMCell(4, 6, bias=False), (3, 4), 3 * (480 + 60 - 48)),
        (nn.RNN(4, 6), (5, 2, 4), 10 * (2 * 60 + 6)),
    ],
)
def test_recurrent_layers_count_by_their_weights(layer: nn.Module, shape: Any, flops: int) -> None:
    assert get_model_profile(layer, shape, as_string=False, print_profile=False)[0] == flops


@pytest.mark.parametrize(
    ("product", "shapes", "flops"),
    [
        (
            nn.functional.scaled_dot_product_attention,
            [(1, 2, 6, 4)] * 3,
            2 * 2 * 2 * 6 * 6 * 4,
        ),  # of two heads, two products of 6 x 6 x 4
        (torch.matmul, [(5,), (5,)], 10),
        (torch.matmul, [(3, 6), (6,)], 36),
        (torch.matmul, [(7,), (7, 2)], 28),
    ],
)
def test_products_of_vectors_and_attention_on_a_cpu_count(
    product: Any, shapes: list[tuple[int, ...]], flops: int
) -> None:
    class Product(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return product(*inputs)

    model = Product()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(*(torch.randn(shape) for shape in shapes))
    profiler.stop_profile()
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (flops, flops // 2)
    profiler.end_profile()
