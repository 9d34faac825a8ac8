"""The bar and the rows: what they show, at 80 columns, in the right place."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

import pytest
from rich.console import Console as Terminal

from polyreme.monitor import Record, Run
from polyreme.monitor import console as console_module
from polyreme.monitor.console import Console, _bytes, _clock, _decimal, _si


def run(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "model": "Llama",
        "parameters": 2_100_000,
        "ranks": 2,
        "stage": 2,
        "dtype": "bf16",
    }
    return Run(**(fields | {"steps": 1000} | changes))


def record(step: int, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "step": step,
        "samples": 8 * step,
        "tokens": 4096 * step,
        "loss": 7.5 - step / 1000,
        "grad_norm": 0.5231,
        "lr": 2e-3,
        "tokens_per_second": 18_423.4,
        "seconds": 0.07,
        "elapsed": step * 0.1,
        "memory_bytes": {"parameters": 1 << 22, "states": 1 << 23, "peak_rss": 702 << 20},
    }
    return Record(**(fields | changes))


def plain_console(every: int = 10) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(every, Terminal(file=out, width=80)), out


def live_console(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(
        10, Terminal(file=out, width=width, force_terminal=True, color_system=None, _environ={})
    ), out


def frame(monitor: Console) -> list[str]:
    """The lines of the bar as they stand now."""
    out = io.StringIO()
    Terminal(file=out, width=80, color_system=None).print(monitor._bar())
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_rows_without_a_terminal() -> None:
    monitor, out = plain_console()
    monitor.start(run())
    for step in range(1, 26):
        monitor.log(record(step))
    monitor.close({})
    title, header, *rows = out.getvalue().splitlines()
    assert title == "Llama: 2.1M parameters, 2 ranks, ZeRO stage 2, bf16, 1,000 steps"
    assert header.split() == [
        *("step", "loss", "val", "loss", "bits/byte", "tok/s", "grad", "norm", "lr", "memory", "left")
    ]
    # The first step, each tenth, and the last one at the end.
    assert [row.split()[0] for row in rows] == ["1/1000", "10/1000", "20/1000", "25/1000"]
    assert rows[1].split()[1:] == ["7.4900", "18.4k", "0.5231", "2.00e-03", "702MiB", "1:39"]
    assert "\x1b" not in out.getvalue()


def test_rows_are_aligned_and_fit_80_columns() -> None:
    monitor, out = plain_console(1)
    monitor.start(run(steps=99_999))
    monitor.log(
        record(
            1, loss=12345.6, grad_norm=float("nan"), elapsed=1e6, validation_loss=99.9999, bits_per_byte=9.5
        )
    )
    monitor.log(
        record(
            99_998,
            loss=2.5,
            tokens_per_second=999_949.0,
            memory_bytes={"parameters": 999 << 30},
            skipped=True,
        )
    )
    monitor.close({})
    header, *rows = out.getvalue().splitlines()[1:]
    assert {len(row) for row in rows} == {len(header)}
    assert len(header) <= 80
    for row in rows:
        ends = {match.end() for match in re.finditer(r"\S+", row)}
        assert ends <= {match.end() for match in re.finditer(r"\S+", header)}
    assert rows[0].split() == [
        "1/99999",
        "1.2e+04",
        "99.9999",
        "9.5000",
        "18.4k",
        "nan",
        "2.00e-03",
        "702MiB",
        ">999d",
    ]
    assert "skipped" in rows[1].split()


def test_a_new_validation_loss_makes_a_row_and_is_shown_once() -> None:
    monitor, out = plain_console()
    monitor.start(run())
    for step in range(1, 11):
        monitor.log(
            record(
                step, validation_loss=6.5 if step == 7 else None, bits_per_byte=2.25 if step == 7 else None
            )
        )
    rows = out.getvalue().splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["1/1000", "7/1000", "10/1000"]
    assert ["6.5000" in row and "2.2500" in row for row in rows] == [False, True, False]


def test_length_that_is_unknown() -> None:
    monitor, out = plain_console()
    monitor.start(run(steps=None))
    monitor.log(record(1))
    title, _, row = out.getvalue().splitlines()
    assert "steps" not in title
    assert row.split() == ["1", "7.4990", "18.4k", "0.5231", "2.00e-03", "702MiB"]


def test_time_left_of_a_resumed_run_counts_its_own_steps() -> None:
    monitor, out = plain_console()
    monitor.start(run(step=500))
    monitor.log(record(510, elapsed=20.0))  # 2 s a step, 490 to go
    assert "from step 500" in out.getvalue()
    assert out.getvalue().splitlines()[-1].endswith("16:20")


def test_the_heading_comes_with_the_first_row() -> None:
    monitor, out = plain_console()
    monitor.start(run())
    monitor.message("a sample")
    monitor.log(record(1))
    monitor.close({"checkpoint": "run/step-10"})
    _, sample, heading, row = out.getvalue().splitlines()
    assert sample == "a sample" and heading.split()[0] == "step" and row.split()[0] == "1/1000"


def test_messages_are_printed_as_they_are() -> None:
    monitor, out = plain_console()
    text = "[bold]not markup[/bold] " + 30 * "long "
    monitor.message(text)
    assert out.getvalue() == text + "\n"


def test_bar_shows_everything_in_80_columns() -> None:
    monitor, _ = live_console()
    monitor.start(run())
    monitor.log(record(500, validation_loss=6.5, bits_per_byte=2.25, mfu=0.314))
    monitor.log(record(501, mfu=0.314))
    first, second = frame(monitor)
    assert re.fullmatch(r"501/1000  ━+\S* *━* *18\.4k tok/s  mfu 31%  702MiB/rank  left 0:50", first)
    # The last validation loss stays until there is a newer one.
    assert second == "loss 6.9990  val loss 6.5000  bits/byte 2.2500  grad norm 0.5231  lr 2.00e-03"
    assert max(len(first), len(second)) <= 80
    monitor.close({})


def test_bar_without_a_length() -> None:
    monitor, _ = live_console()
    monitor.start(run(steps=None))
    assert frame(monitor) == ["waiting for the first step"]
    monitor.log(record(3, memory_bytes={}))
    first, second = frame(monitor)
    assert first.split() == ["3", "18.4k", "tok/s"]
    assert second == "loss 7.4970  grad norm 0.5231  lr 2.00e-03"
    monitor.close({})


def test_live_output_has_messages_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "REDRAW_SECONDS", 0.0)
    monitor, out = live_console()
    monitor.start(run())
    monitor.log(record(1))
    monitor.message("saved run/step-1")
    monitor.log(record(2))
    monitor.close({"done": "yes"})
    text = out.getvalue()
    assert text.index("1/1000") < text.index("saved run/step-1") < text.index("2/1000")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back
    lines = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80


def test_bar_is_drawn_no_more_often_than_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(x * 0.01 for x in range(1000))
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(clock))
    monitor, out = live_console()
    monitor.start(run())
    for step in range(1, 101):
        monitor.log(record(step))
    drawn = out.getvalue().count("tok/s")
    assert 5 <= drawn <= 12  # once in 0.1 s of a clock that each look moves by 0.01 s
    monitor.close({})


def test_a_dumb_terminal_gets_rows() -> None:
    out = io.StringIO()
    monitor = Console(10, Terminal(file=out, width=80, force_terminal=True, _environ={"TERM": "dumb"}))
    monitor.start(run())
    monitor.log(record(1))
    assert "1/1000" in out.getvalue() and "\x1b[?25l" not in out.getvalue()


def test_device_memory_goes_before_the_process() -> None:
    monitor, out = plain_console()
    monitor.start(run())
    monitor.log(record(1, memory_bytes={"parameters": 5, "peak_rss": 2 << 30, "peak_device": 79 << 30}))
    assert "79.0GiB" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.0k"),
        (18_423, "18.4k"),
        (99_960, "100k"),
        (2.1e6, "2.1M"),
        (70e9, "70.0B"),
        (3e15, "3000T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert _si(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12B"), (1000, "1.0KiB"), (702 << 20, "702MiB"), (1023 << 20, "1.0GiB"), (79 << 30, "79.0GiB")],
)
def test_sizes(value: int, text: str) -> None:
    assert _bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.4, "0:00"),
        (59.6, "1:00"),
        (3723, "1:02:03"),
        (86399.7, "1d00h"),
        (97200, "1d03h"),
        (1e9, ">999d"),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert _clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.52314, "0.5231"),
        (99.99999, "100.0"),
        (9999.9, "9999.9"),
        (9999.99, "1.0e+04"),
        (-1e30, "-1.0e+30"),
    ],
)
def test_decimals(value: float | None, text: str) -> None:
    assert _decimal(value) == text


def test_where_nobody_reads_on_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would end it with status 1; the monitor only stops."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(BrokenPipeError):
            Console(10).message("text")
        with contextlib.suppress(BrokenPipeError):
            out.close()
