"""The log file of a run: one JSON object per line.

Invariant: each line is complete as soon as its step ends, or, where the disk is full, as soon as there is
room. A process killed while writing costs the one line it was writing. A run resumed in the same folder
continues the same file, without the steps that it does again."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from polyreme.errors import DataError
from polyreme.files.direct_io import no_links
from polyreme.monitor.record import Record, Run, plain

LOG_NAME = "log.jsonl"


class JSONL:
    """Appends to `log.jsonl` in `folder`: a line of kind "run", then lines of kind "step", "message" and
    "summary"."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME
        self._file: BinaryIO | None = None
        self._waiting = b""

    def start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "ab", buffering=0, opener=no_links)  # noqa: SIM115
        if run.step:
            os.truncate(self._file.fileno(), _end_of(self._path, run.step))
        torn = _is_torn(self._path)
        self._waiting = b"\n" if torn else b""  # a torn last line of a killed process stays a line of its own
        self._write(
            "run", {"started": datetime.now(UTC).isoformat(timespec="seconds"), **dataclasses.asdict(run)}
        )

    def log(self, record: Record) -> None:
        self._write("step", dataclasses.asdict(record))

    def message(self, text: str) -> None:
        self._write("message", {"text": text})

    def close(self, summary: Mapping[str, object]) -> None:
        if self._file is not None:
            self._write("summary", summary)
            self._file.close()
            self._file = None
            if self._waiting:
                raise OSError(
                    errno.ENOSPC,
                    f"the last {len(self._waiting)} bytes of the log were not written",
                    str(self._path),
                )

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._file is None:
            return
        line = json.dumps({"kind": kind, **plain(fields)}, ensure_ascii=False, allow_nan=False)
        self._waiting += line.encode(errors="backslashreplace") + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def _end_of(path: Path, step: int) -> int:
    """Return the length in bytes of a log up to `step` steps of its last run, or up to the summary at its
    end, if that comes earlier."""
    end = at = 0
    over = False
    with path.open("rb") as lines:
        for line in lines:
            at += len(line)
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            kind = entry.get("kind") if isinstance(entry, dict) else None
            if kind == "run" and not entry.get("step"):
                over = False
            over = over or kind == "summary" or (kind == "step" and entry.get("step", 0) > step)
            if not over:
                end = at
    return end


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run and its steps as `JSONL` wrote them, each step once and in order; NaN reads as None.

    Where a resumed run did steps again, the later ones count. Incomplete lines are skipped. Raises
    `DataError` if there is no such file or it has no run."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such log; a run writes it where monitor.jsonl = true")
    run: dict[str, Any] | None = None
    elapsed = 0.0
    steps: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            kind = entry.get("kind") if isinstance(entry, dict) else None
            if kind == "run":
                run, elapsed = entry, 0.0
                steps = {step: fields for step, fields in steps.items() if step <= entry["step"]}
            elif kind == "step":
                # an older format: its `seconds` count from the start of the process
                if "elapsed" not in entry:
                    so_far = entry.get("seconds") or elapsed
                    entry |= {"seconds": so_far - elapsed, "elapsed": so_far}
                elapsed = entry["elapsed"]
                steps[entry["step"]] = entry
    if run is None:
        raise DataError(f"{path}: not the log of a run; give the log.jsonl in a run's folder")
    return run, [steps[step] for step in sorted(steps)]
