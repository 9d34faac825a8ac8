"""The log file of a run: one JSON object per line.

Invariant: each line is complete as soon as its step ends, and the file only grows. A process killed while writing costs
the one line it was writing; a run resumed in the same folder goes on in the same file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from polyreme.errors import DataError
from polyreme.monitor.record import Record, Run, plain

LOG_NAME = "log.jsonl"


class JSONL:
    """Appends to `log.jsonl` in `folder`: a line of kind "run", then lines of kind "step", "message" and "summary"."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME
        self._file: TextIO | None = None

    def start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._file.write("\n")  # what a killed process left of its last line stays by itself
        self._write("run", {"started": datetime.now(UTC).isoformat(timespec="seconds"), **dataclasses.asdict(run)})

    def log(self, record: Record) -> None:
        self._write("step", dataclasses.asdict(record))

    def message(self, text: str) -> None:
        self._write("message", {"text": text})

    def close(self, summary: Mapping[str, object]) -> None:
        if self._file is not None:
            self._write("summary", summary)
            self._file.close()
            self._file = None

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **plain(fields)}, ensure_ascii=False, allow_nan=False) + "\n")


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run and its steps as `JSONL` wrote them, each step once and in order; NaN reads as None.

    Where a resumed run did steps again, the later ones count. Lines that are not complete are passed over. Raises
    `DataError` if there is no such file or it has no run.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such log; a run writes it where monitor.jsonl = true")
    run: dict[str, Any] | None = None
    steps: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            kind = entry.get("kind") if isinstance(entry, dict) else None
            if kind == "run":
                run = entry
                steps = {step: fields for step, fields in steps.items() if step <= entry["step"]}
            elif kind == "step":
                steps[entry["step"]] = entry
    if run is None:
        raise DataError(f"{path}: not the log of a run; give the log.jsonl in a run's folder")
    return run, [steps[step] for step in sorted(steps)]
