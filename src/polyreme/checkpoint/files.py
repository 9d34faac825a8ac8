"""Reads files that may be damaged or made to harm: every problem is a CheckpointError that names the file. No
communication."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyreme.config.loading import distinct
from polyreme.errors import CheckpointError

JSON_LIMIT = 1 << 30
"""Bytes. A JSON file of a checkpoint that is larger than this is not read."""
LONGEST_NAME = 255
"""Bytes of a file's name on any file system."""


def damaged(file: Path, what: str) -> CheckpointError:
    """Return the error that `file` is damaged, for the reason `what`."""
    return CheckpointError(
        f"{file} is damaged: {what}. Copy it again from where it was whole, or use an earlier checkpoint"
    )


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an OSError, raised inside while `file` is read, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def is_plain(name: object) -> bool:
    """Whether `name` is a relative path that stays within its folder on any system: with slashes, and without
    `..`, drives and control characters."""
    if not isinstance(name, str) or "\\" in name or ":" in name or not name.isprintable():
        return False
    return all(each not in ("", ".", "..") for each in name.split("/"))


def locate(folder: Path, name: str) -> tuple[Path, int]:
    """Return the path of the regular file `name` (see `is_plain`) in `folder`, and its size in bytes.

    Raises CheckpointError where there is none, and where a link leads out of the folder; but links of the
    Hugging Face cache, from its folders `snapshots/*` to the files of `blobs`, are followed."""
    file = folder / name
    with reading(file):
        status = file.stat()
        root, target = folder.resolve(), file.resolve()
    blobs = root.parent.parent / "blobs"
    if not target.is_relative_to(root) and not (root.parent.name == "snapshots" and target.parent == blobs):
        raise CheckpointError(
            f"{file} is a link that leads out of the checkpoint, "
            f"to {target}: put the file itself in its place"
        )
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a file")
    return file, status.st_size


def fill(file: Path, memory: memoryview, offset: int) -> None:
    """Fill `memory` with the bytes of `file` from `offset` on. Raises CheckpointError where there are
    fewer."""
    for _ in chunks(file, offset, offset + len(memory), memory):
        pass


def chunks(file: Path, start: int, stop: int, memory: memoryview) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of `file` piece by piece, each read into `memory`. Raises CheckpointError
    where there are fewer."""
    with reading(file), file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while start < stop:
            chunk = memory[: min(len(memory), stop - start)]
            start += len(chunk)
            rest = chunk
            while rest:
                count = opened.readinto(rest)
                if not count:
                    raise damaged(file, f"it ends {len(rest) + stop - start} bytes early")
                rest = rest[count:]
            yield chunk


def read_name(file: Path) -> str:
    """Return the text of a file that holds the name of an entry of its folder and nothing else. Raises
    CheckpointError where that is too long for a name."""
    with reading(file), file.open("rb") as opened:
        text = opened.read(4 * LONGEST_NAME).decode(errors="replace").strip()
    if len(text.encode()) > LONGEST_NAME:
        raise CheckpointError(
            f"{file} names no folder, but begins with {text[:40]!r}: write the name of the folder with the "
            "checkpoint into it, or give that folder itself"
        )
    return text


def read_json(file: Path) -> dict[str, Any]:
    """Read the object that a JSON file holds. Raises CheckpointError as `parse_json` does, and above
    JSON_LIMIT."""
    with reading(file):
        size = file.stat().st_size
    if size > JSON_LIMIT:
        raise damaged(file, f"it has {size} bytes, and no more than {JSON_LIMIT} are read")
    text = bytearray(size)
    fill(file, memoryview(text), 0)
    return parse_json(text, file)


def parse_json(text: bytes | bytearray, file: Path) -> dict[str, Any]:
    """Return the object that `text`, from `file`, holds. Raises CheckpointError where it is not valid, and
    where a key comes twice: parsers differ in which one counts."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it holds no valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(file, f"its JSON is a {type(value).__name__}, not an object")
    return value
