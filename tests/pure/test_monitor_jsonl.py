"""The log file: complete lines, strict JSON, safe to append to after a kill or a resume."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.errors import DataError
from polyreme.monitor import LOG_NAME, Record, Run, read_log
from polyreme.monitor.jsonl import JSONL


def run(step: int = 0, **config: object) -> Run:
    return Run(
        model="Llama",
        parameters=10,
        ranks=2,
        stage=3,
        dtype="bf16",
        steps=100,
        step=step,
        config={"model": config},
    )


def record(step: int, loss: float = 2.0, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "samples": 4,
        "tokens": 64,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens_per_second": 5.0,
    }
    return Record(step=step, loss=loss, seconds=1.5, **(fields | changes))


def strict(line: str) -> Any:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_lines(tmp_path: Path) -> None:
    monitor = JSONL(tmp_path / "new" / "run")
    monitor.start(run(path=Path("models/base"), text="ü"))
    monitor.log(record(1, memory_bytes={"parameters": 8}, traffic={"dp": {"all_gather": (2, 64)}}))
    monitor.log(record(2, float("nan"), grad_norm=float("inf"), skipped=True, loss_scale=65536.0))
    monitor.message("two\nlines")
    monitor.close({"checkpoint": Path("run/step-2"), "loss": float("nan")})
    lines = (tmp_path / "new" / "run" / LOG_NAME).read_text("utf-8").splitlines()
    first, step1, step2, message, summary = map(strict, lines)
    assert first["kind"] == "run" and first["stage"] == 3 and first["steps"] == 100
    assert first["config"] == {"model": {"path": "models/base", "text": "ü"}}
    assert step1["kind"] == "step" and step1["step"] == 1 and step1["loss"] == 2.0
    assert step1["memory_bytes"] == {"parameters": 8}
    assert step1["traffic"] == {"dp": {"all_gather": [2, 64]}}
    assert step1["validation_loss"] is None and step1["mfu"] is None
    assert step2["loss"] is None and step2["grad_norm"] is None and step2["skipped"] is True
    assert message == {"kind": "message", "text": "two\nlines"}
    assert summary == {"kind": "summary", "checkpoint": "run/step-2", "loss": None}


def test_each_step_is_in_the_file_at_once(tmp_path: Path) -> None:
    monitor = JSONL(tmp_path)
    monitor.start(run())
    for step in range(1, 4):
        monitor.log(record(step))
        assert [entry["step"] for entry in read_log(tmp_path / LOG_NAME)[1]] == list(range(1, step + 1))
    monitor.close({})
    monitor.close({})  # nothing more is written
    assert (tmp_path / LOG_NAME).read_text().count('"summary"') == 1


def test_lines_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    class Disk:
        """A file with room for so many bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 30

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self.file.write(data[: self.room])
            self.room -= written
            return int(written)

        def close(self) -> None:
            self.file.close()

    monitor = JSONL(tmp_path)
    monitor.start(run())
    disk: Any = Disk(monitor._file)
    monitor._file = disk
    monitor.log(record(1))
    monitor.log(record(2))
    assert read_log(tmp_path / LOG_NAME)[1] == []
    disk.room = 10_000
    monitor.log(record(3))
    assert [step["step"] for step in read_log(tmp_path / LOG_NAME)[1]] == [1, 2, 3]
    disk.room = 0
    with pytest.raises(OSError, match="bytes of the log were not written"):
        monitor.close({})


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    monitor = JSONL(tmp_path)
    monitor.start(run())
    monitor.log(record(1))
    monitor.log(record(2))
    path = tmp_path / LOG_NAME
    path.write_bytes(path.read_bytes()[:-20])  # killed while writing step 2
    again = JSONL(tmp_path)
    again.start(run(step=1))
    again.log(record(2, 1.25))
    again.close({})
    header, steps = read_log(path)
    assert header["step"] == 1
    assert [(entry["step"], entry["loss"]) for entry in steps] == [(1, 2.0), (2, 1.25)]


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    for start, steps, loss in [(0, range(1, 8), 3.0), (5, range(6, 8), 2.0)]:
        monitor = JSONL(tmp_path)
        monitor.start(run(step=start))
        for step in steps:
            monitor.log(record(step, loss))
        monitor.close({})
    assert [entry["loss"] for entry in read_log(tmp_path / LOG_NAME)[1]] == [3.0] * 5 + [2.0] * 2
    fresh = JSONL(tmp_path)  # a new run in the same folder leaves nothing of the old one
    fresh.start(run())
    fresh.close({})
    assert read_log(tmp_path / LOG_NAME)[1] == []


def test_a_resumed_run_goes_on_where_its_checkpoint_was_written(tmp_path: Path) -> None:
    def go(start: int, stop: int, summary: bool = True) -> str:
        """Steps, a message after the third and the sixth, and the summary; the lines that are then in the
        file, in short."""
        monitor = JSONL(tmp_path)
        monitor.start(run(step=start))
        for step in range(start + 1, stop + 1):
            monitor.log(record(step))
            if step % 3 == 0:
                monitor.message("saving")
        if summary:
            monitor.close({})
        entries = map(json.loads, (tmp_path / LOG_NAME).read_text().splitlines())
        return " ".join(
            str(entry.get("step", entry["kind"])) if entry["kind"] != "run" else f"run{entry['step']}"
            for entry in entries
        )

    earlier = "run0 1 2 3 message 4 summary"
    assert go(0, 4) == earlier
    assert go(0, 5, summary=False) == f"{earlier} run0 1 2 3 message 4 5"
    assert go(3, 7) == f"{earlier} run0 1 2 3 message run3 4 5 6 message 7 summary"
    assert go(7, 8, summary=False) == f"{earlier} run0 1 2 3 message run3 4 5 6 message 7 run7 8"
    path = tmp_path / LOG_NAME
    path.write_bytes(path.read_bytes()[:-20])  # killed while writing
    assert go(6, 7) == f"{earlier} run0 1 2 3 message run3 4 5 6 message run6 7 summary"
    assert [entry["step"] for entry in read_log(path)[1]] == [1, 2, 3, 4, 5, 6, 7]


def test_not_a_log(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: there is no such log"):
        read_log(tmp_path / "nothing.jsonl")
    for text in ["", "not json\n", '{"a": 1}\n', "[1, 2]\n3\n"]:
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(DataError, match=r"other\.jsonl: not the log of a run"):
            read_log(tmp_path / "other.jsonl")


def test_seconds_are_those_of_each_step_also_of_a_log_that_counted_them_together(tmp_path: Path) -> None:
    new, old = JSONL(tmp_path / "new"), tmp_path / "old"
    new.start(run())
    new.log(record(1, elapsed=2.0))
    new.log(record(2, elapsed=9.0))
    _, steps = read_log(tmp_path / "new" / LOG_NAME)
    assert [(step["seconds"], step["elapsed"]) for step in steps] == [(1.5, 2.0), (1.5, 9.0)]
    lines = [{"kind": "run", "step": 0}, {"kind": "step", "step": 1, "seconds": 2.0},
             {"kind": "step", "step": 2, "seconds": 2.5}, {"kind": "run", "step": 2},
             {"kind": "step", "step": 3, "seconds": 1.0}]  # fmt: skip
    old.write_text("\n".join(map(json.dumps, lines)))
    _, steps = read_log(old)
    assert [step["seconds"] for step in steps] == [2.0, 0.5, 1.0]
