"""The picture of a run: drawn for every shape of log, and of the right numbers."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.errors import ConfigError, DataError
from polyreme.monitor import LOG_NAME, Record, Run
from polyreme.monitor.jsonl import JSONL
from polyreme.monitor.plot import TRAINING, _running_mean, plot_losses


def write_log(
    folder: Path, losses: list[float], validation: dict[int, float], bits: float | None = 0.39
) -> Path:
    monitor = JSONL(folder)
    monitor.start(Run(model="Llama", parameters=2_100_000, ranks=2, stage=2, dtype="bf16"))
    for step, loss in enumerate(losses, 1):
        measured = validation.get(step)
        fields: dict[str, Any] = {"validation_loss": measured}
        if measured is not None and bits is not None:
            fields["bits_per_byte"] = measured * bits
        monitor.log(
            Record(
                step=step,
                samples=step,
                tokens=100 * step,
                loss=loss,
                grad_norm=1.0,
                lr=1e-3,
                tokens_per_second=1.0,
                seconds=1.0,
                **fields,
            )
        )
    monitor.close({})
    return folder / LOG_NAME


@pytest.mark.parametrize(
    ("losses", "validation", "bits"),
    [
        ([7 * math.exp(-step / 100) for step in range(300)], {100: 3.0, 200: 2.0, 300: 1.5}, 0.39),
        ([4.0, float("nan"), 3.0], {}, None),
        ([2.0], {1: 2.0}, None),
        ([0.0, 0.0], {}, 0.39),
    ],
    ids=["a run", "with a skipped step", "one step", "flat at zero"],
)
def test_draws(tmp_path: Path, losses: list[float], validation: dict[int, float], bits: float | None) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    png = tmp_path / "plots" / "loss.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_losses(write_log(tmp_path, losses, validation, bits), png)
    image = imread(png)
    assert image.shape[0] > 500 and image.shape[1] > 900
    assert (np.abs(image[..., :3] - to_rgb(TRAINING)).max(axis=-1) < 0.02).sum() > 20  # the curve is there


def test_curves_hold_the_logged_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    losses = [5 - step / 50 for step in range(200)]
    plot_losses(write_log(tmp_path, losses, {50: 4.5, 200: 1.25}), tmp_path / "loss.png")
    upper, lower = drawn[0].axes[:2]
    lines = {str(line.get_label()): line for line in upper.get_lines()}
    assert np.allclose(lines["training, each step"].get_ydata(), losses)
    assert list(lines["validation"].get_xdata()) == [50, 200]
    assert np.allclose(lines["validation"].get_ydata(), [4.5, 1.25])
    # A mean centred on its step leaves a straight line where it is, apart from the ends.
    assert np.allclose(lines["training, mean of 5 steps"].get_ydata()[2:-2], losses[2:-2])
    assert np.allclose(lower.get_lines()[0].get_ydata(), 1e-3)
    right, above = upper.child_axes
    assert np.allclose(right._functions[0](np.array([1.0, 2.0])), [0.39, 0.78])
    assert np.allclose(above._functions[0](np.array([1.0, 200.0])), [100, 20_000])


def test_running_mean_passes_over_nan() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan, 2.0])
    assert np.allclose(_running_mean(values, 3), [1, 2, 4, 4, 5, np.nan, 2, 2], equal_nan=True)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "polyreme.monitor.plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.ticker", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib, or set monitor\.plot = false"):
        importlib.import_module("polyreme.monitor.plot")


def test_nothing_to_plot(tmp_path: Path) -> None:
    log = write_log(tmp_path, [float("nan")], {})
    with pytest.raises(DataError, match=r"no step with a loss"):
        plot_losses(log, tmp_path / "loss.png")
    with pytest.raises(DataError, match=r"there is no such log"):
        plot_losses(tmp_path / "none.jsonl", tmp_path / "loss.png")
