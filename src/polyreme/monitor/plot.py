"""The picture of a run: losses and learning rate over steps, from the run's log file.

Invariant: drawn off screen, with no global state of matplotlib touched. Importing this module without
matplotlib raises `ConfigError`, so a run that is to end with a plot imports it before it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError, DataError, Problem
from polyreme.files.direct_io import no_links
from polyreme.monitor import read_log

try:
    import matplotlib.ticker
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
except ImportError as error:
    fix = "pip install matplotlib, or set monitor.plot = false"
    raise ConfigError([Problem("monitor.plot", True, f"a plot needs matplotlib ({error})", fix)]) from error

Floats = NDArray[np.float64]
TRAINING, VALIDATION, RATE, INK, MUTED = "#3b6fb6", "#d1602b", "#5a8f5a", "#222222", "#707070"


def plot_losses(jsonl: Path, png: Path) -> None:
    """Draw `jsonl`, the log of a run (`log.jsonl`), into the image file `png`.

    The upper panel holds the training loss of each step, its running mean and the validation loss, with
    tokens along the top and, where the log has them, bits per byte of the validation text on the right; the
    lower one the learning rate. Steps without a finite loss leave a gap. Raises `DataError` if the log holds
    no step with a loss."""
    run, steps = read_log(jsonl)
    series = {
        name: _column(steps, name)
        for name in ("step", "tokens", "loss", "validation_loss", "bits_per_byte", "lr")
    }
    if not np.isfinite(series["loss"]).any():
        raise DataError(f"{jsonl}: no step with a loss to plot; train for at least one step")
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_losses(upper, series)
    _draw_rate(lower, series)
    _draw_title(figure, run, series)
    png.parent.mkdir(parents=True, exist_ok=True)
    with open(png, "wb", opener=no_links) as file:
        figure.savefig(file, format=png.suffix[1:] or "png")


def _column(steps: list[dict[str, Any]], name: str) -> Floats:
    return np.array([np.nan if step[name] is None else step[name] for step in steps], dtype=np.float64)


def _running_mean(values: Floats, window: int) -> Floats:
    """Return the centred mean over `window` values, shorter at the ends, skipping NaN."""
    valid = np.isfinite(values)
    ones = np.ones(min(window, len(values)))
    total = np.convolve(np.where(valid, values, 0.0), ones, mode="same")
    count = np.convolve(valid.astype(np.float64), ones, mode="same")
    mean: Floats = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0.5)
    return mean


def _draw_losses(axes: Axes, series: dict[str, Floats]) -> None:
    step, loss, validation = series["step"], series["loss"], series["validation_loss"]
    window = max(1, len(step) // 50) | 1
    smooth = _running_mean(loss, window)
    look = {"alpha": 0.3, "lw": 0.8} if window > 1 else {"lw": 1.6, "marker": "o", "ms": 4, "mec": "white"}
    axes.plot(step, loss, color=TRAINING, label="training, each step", **look)
    if window > 1:
        axes.plot(step, smooth, color=TRAINING, lw=1.8, label=f"training, mean of {window} steps")
    measured = np.isfinite(validation)
    if measured.any():
        axes.plot(
            step[measured],
            validation[measured],
            color=VALIDATION,
            label="validation",
            lw=1.6,
            marker="o",
            ms=4,
            mec="white",
        )
    top = np.nanmax([np.nanpercentile(loss, 99.5), np.nanmax(smooth), *validation[measured]])
    bottom = np.nanmin([np.nanmin(loss), *validation[measured]])
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    axes.set_ylim(bottom - margin, top + margin)
    axes.set_ylabel("loss", color=INK)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.grid(color="#e4e4e4", lw=0.6)
    _tidy(axes)
    both = measured & np.isfinite(series["bits_per_byte"]) & (validation > 0)
    if both.any():
        # The same text is measured each time, so bits per byte is the loss in another unit.
        scale = float((series["bits_per_byte"][both] / validation[both]).mean())
        axes.set_ylabel("loss (nats per token)", color=INK)
        right = axes.secondary_yaxis("right", functions=_line(scale))
        right.set_ylabel("bits per byte", color=MUTED)
        right.tick_params(colors=MUTED, labelsize=9)
        right.spines["right"].set_color("#cccccc")
    if len(step) > 1 and series["tokens"][-1] > series["tokens"][0]:
        _draw_tokens(axes, step, series["tokens"])


def _line(
    slope: float, x0: float = 0.0, y0: float = 0.0
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the line through (x0, y0), and its inverse."""
    return lambda x: y0 + (x - x0) * slope, lambda y: x0 + (y - y0) / slope


def _draw_tokens(axes: Axes, step: Floats, tokens: Floats) -> None:
    slope = (tokens[-1] - tokens[0]) / (step[-1] - step[0])
    above = axes.secondary_xaxis("top", functions=_line(slope, step[0], tokens[0]))
    above.set_xlabel("tokens", color=MUTED, fontsize=9)
    above.tick_params(colors=MUTED, labelsize=9)
    above.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    above.spines["top"].set_color("#cccccc")


def _draw_rate(axes: Axes, series: dict[str, Floats]) -> None:
    step, few = series["step"], len(series["step"]) < 3
    axes.plot(step, series["lr"], color=RATE, lw=1.4, marker="o" if few else None, ms=4)
    axes.set_ylim(0, 1.15 * (np.nanmax(series["lr"]) or 1.0))
    axes.set_ylabel("learning rate", color=INK)
    axes.set_xlabel("step", color=INK)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3))
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.3g}"))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    pad = max(0.5, 0.015 * (step[-1] - step[0]))
    axes.set_xlim(step[0] - pad, step[-1] + pad)
    axes.grid(color="#e4e4e4", lw=0.6)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)


def _draw_title(figure: Figure, run: dict[str, Any], series: dict[str, Floats]) -> None:
    size = matplotlib.ticker.EngFormatter(places=1, sep="")(run["parameters"]).replace("G", "B")
    ranks = f"{run['ranks']} rank{'s' if run['ranks'] != 1 else ''}"
    title = f"{run['model']}, {size} parameters, {ranks}, ZeRO stage {run['stage']}, {run['dtype']}"
    final = [f"{series['loss'][np.isfinite(series['loss'])][-1]:.3f} training"]
    for name, unit in (("validation_loss", "validation"), ("bits_per_byte", "bits per byte")):
        known = series[name][np.isfinite(series[name])]
        if len(known):
            final.append(f"{known[-1]:.3f} {unit}")
    figure.suptitle(f"{title}\n", fontsize=11, color=INK)
    figure.text(
        0.5, 0.945, f"last loss: {', '.join(final)}", ha="center", va="center", fontsize=9, color=MUTED
    )
