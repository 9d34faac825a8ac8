"""Progress on the terminal: a live bar where there is one, else one aligned line every few steps.

Invariant: at 80 columns nothing wraps, and messages never break the bar. No thread of its own: the bar is
drawn by the step that changes it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.errors import printable
from polyreme.monitor.record import Record, Run

REDRAW_SECONDS = 0.1
_WIDTHS = {
    "loss": 7, "val loss": 8, "bits/byte": 9, "tok/s": 6, "grad norm": 9, "lr": 8, "memory": 7, "left": 7,
}  # fmt: skip


class _Output(Terminal):
    """Standard output that a run outlives: where nobody reads on (`| head`), rich would end the process with
    status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Console:
    """Shows progress on `terminal` (default: standard output): a bar, or without a terminal a row each
    `every` steps.

    Rows also appear for the first and the last step and wherever a validation loss is new.
    """

    def __init__(self, every: int, terminal: Terminal | None = None) -> None:
        self._every = every
        self._terminal = terminal or _Output()
        self._run: Run | None = None
        self._live: Live | None = None
        self._drawn = float("-inf")
        self._last: Record | None = None
        self._row_step = 0
        self._validation: tuple[float | None, float | None] = (None, None)

    def start(self, run: Run) -> None:
        self._run = run
        facts = [
            f"{run.model}: {_si(run.parameters)} parameters",
            f"{run.ranks:,} rank{'s' if run.ranks != 1 else ''}",
            f"ZeRO stage {run.stage}",
            run.dtype,
            *([f"{run.steps:,} steps"] if run.steps else []),
            *([f"from step {run.step:,}"] if run.step else []),
        ]
        self.message(", ".join(facts))
        if self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            self._live = Live(console=self._terminal, auto_refresh=False, get_renderable=self._bar)
            self._live.start()

    def log(self, record: Record) -> None:
        self._last = record
        if record.validation_loss is not None:
            self._validation = (record.validation_loss, record.bits_per_byte)
        if self._live is None:
            first = self._row_step == 0
            last = self._run is not None and record.step == self._run.steps
            if first or last or record.step % self._every == 0 or record.validation_loss is not None:
                self._print_row(record)
        elif time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def message(self, text: str) -> None:
        self._terminal.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def close(self, summary: Mapping[str, object]) -> None:
        """Stop the bar, or print the last row if it is not there yet. Of `summary` nothing is shown: the
        end of a run is a message."""
        if self._live is not None:
            self._live.refresh()
            self._live.stop()
            self._live = None
        elif self._last is not None and self._last.step != self._row_step:
            self._print_row(self._last)

    def _print_row(self, record: Record) -> None:
        if self._row_step == 0:
            self.message(self._row(dict.fromkeys(_WIDTHS, ""), "step", header=True))
        self._row_step = record.step
        values = self._values(record, record.validation_loss, record.bits_per_byte)
        self.message(self._row(values, self._progress(record)))

    def _row(self, values: Mapping[str, str], step: str, header: bool = False) -> str:
        width = max(4, len(self._progress(None)))
        cells = [f"{name if header else values[name]:>{size}}" for name, size in _WIDTHS.items()]
        return " ".join([f"{step:>{width}}", *cells])

    def _progress(self, record: Record | None) -> str:
        """Return "512/1000", or without the total where that would be long or is not known; for None, the
        widest text."""
        total = self._run.steps if self._run else None
        step = record.step if record else total or 10**7
        return f"{step}/{total}" if total and total < 100_000 else str(step)

    def _values(
        self, record: Record, validation_loss: float | None, bits_per_byte: float | None
    ) -> dict[str, str]:
        memory = record.memory_bytes
        in_use = memory.get("peak_device") or memory.get("peak_rss") or sum(memory.values())
        return {
            "loss": _decimal(record.loss),
            "val loss": _decimal(validation_loss),
            "bits/byte": _decimal(bits_per_byte),
            "tok/s": _si(record.tokens_per_second),
            "grad norm": "skipped" if record.skipped else _decimal(record.grad_norm),
            "lr": f"{record.lr:.2e}",
            "memory": _bytes(in_use) if in_use else "",
            "left": _clock(self._seconds_left(record)),
        }

    def _seconds_left(self, record: Record) -> float | None:
        if self._run is None or self._run.steps is None or record.step <= self._run.step:
            return None
        return (self._run.steps - record.step) * record.elapsed / (record.step - self._run.step)

    def _bar(self) -> RenderableType:
        record = self._last
        if record is None:
            return Text("waiting for the first step")
        shown = self._values(record, *self._validation)
        total = self._run.steps if self._run else None
        speed = f"{shown['tok/s']} tok/s"
        if record.mfu is not None:
            speed += f"  mfu {record.mfu:.0%}"
        memory = f"{shown['memory']}/rank" if shown["memory"] else ""
        left = f"left {shown['left']}" if shown["left"] else ""
        first = Table.grid(expand=True, padding=(0, 2, 0, 0))
        first.add_column(no_wrap=True)
        first.add_column(ratio=1, min_width=4)
        first.add_column(no_wrap=True)
        bar = ProgressBar(total=total, completed=record.step) if total else Text()
        first.add_row(self._progress(record), bar, "  ".join(filter(None, [speed, memory, left])))
        second = Text(no_wrap=True, overflow="ellipsis")
        for name in ("loss", "val loss", "bits/byte", "grad norm", "lr"):
            if shown[name]:
                second.append(f"{name} ", style="dim").append(f"{shown[name]}  ", style="bold")
        return Group(first, second)


def _decimal(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) < 99.99995:
        return f"{value:.4f}"
    return f"{value:.1f}" if abs(value) < 9999.95 else f"{value:.1e}"


def _si(value: float) -> str:
    """Return three digits and a unit: 950, 18.9k, 2.1M, 70B."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def _bytes(value: float) -> str:
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    # The unit changes at 1000 for either base: never four digits.
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value /= base
        power += 1
    digits = 1 if power and abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{units[power]}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h" if hours < 24_000 else ">999d"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
