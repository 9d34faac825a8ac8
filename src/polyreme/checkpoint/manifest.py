"""`resume.json`: the state of training besides tensors, and the size and CRC-32 of each file of a checkpoint.

Invariant: `read` returns what `dump` was given, or raises; paths of files stay within the folder. No
communication."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from polyreme.checkpoint.files import damaged, is_plain, locate, read_json, reading
from polyreme.errors import CheckpointError

NAME = "resume.json"
FORMAT, VERSION = "polyreme", 1


class File(NamedTuple):
    """The size in bytes and the CRC-32 of a file as it was written."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Resume:
    """The content of resume.json. All but `files` and `zero_stage` are mappings from strings to whatever JSON
    can hold (NaN and infinities included)."""

    files: Mapping[str, File] = field(default_factory=dict)
    """Every file but resume.json itself, by path within the folder, with slashes."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The engine's counts and options: steps, samples, tokens, learning rate, loss scale (see KINDS)."""
    mesh: Mapping[str, Any] = field(default_factory=dict)
    """The size of each axis."""
    zero_stage: int = 0
    rng: Mapping[str, Any] = field(default_factory=dict)
    """The states of the random-number generators, by rank."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The position in the training data."""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Versions of Polyreme, torch and the other packages that wrote the checkpoint."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The user's own, given to `save`."""


def dump(resume: Resume) -> bytes:
    """Return the text of resume.json. Raises CheckpointError for values that JSON cannot hold, and for any
    that `read` would refuse."""
    tree: dict[str, Any] = {"format": FORMAT, "version": VERSION} | {
        each.name: getattr(resume, each.name) for each in fields(Resume)
    }
    tree["files"] = {
        name: {"size": file.size, "crc32": f"{file.crc32:08x}"} for name, file in resume.files.items()
    }
    try:
        tree = json.loads(json.dumps(tree))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} cannot hold this state: {error}") from error
    wrong = _wrong(tree)
    if wrong:
        raise CheckpointError(f"{NAME} cannot be written: {wrong}")
    return json.dumps(tree | {"self": _checksum(tree)}, indent=1).encode() + b"\n"


def write(folder: Path, resume: Resume) -> None:
    """Write resume.json into the folder, without flushing it to the disk."""
    (folder / NAME).write_bytes(dump(resume))


def read(folder: Path) -> Resume | None:
    """Read the folder's resume.json; None where there is none. Raises CheckpointError for one that is
    damaged, or of a newer version."""
    file = folder / NAME
    with reading(folder):
        if NAME not in (entry.name for entry in folder.iterdir()):
            return None
    tree = read_json(locate(folder, NAME)[0])
    version = tree.get("version")
    if tree.get("format") == FORMAT and type(version) is int and version > VERSION:
        raise CheckpointError(f"{file} has version {version} of the format, "
                              f"and this Polyreme reads up to version {VERSION}: "
                              "use a Polyreme as new as the one that "
                              f"wrote it ({tree.get('versions')!r:.200})")  # fmt: skip
    if tree.get("format") != FORMAT or version != VERSION:
        raise damaged(
            file,
            f"its format is {tree.get('format')!r:.200}, version "
            f"{version!r:.200}, not {FORMAT!r}, version {VERSION}",
        )
    expected = tree.pop("self", None)
    if expected != _checksum(tree):
        raise damaged(file, f"its own checksum is {_checksum(tree)}, and it says {expected!r:.200}")
    wrong = _wrong(tree)
    if wrong:
        raise damaged(file, wrong)
    table = {name: File(row["size"], int(row["crc32"], 16)) for name, row in tree["files"].items()}
    return Resume(table, **{each.name: tree[each.name] for each in fields(Resume) if each.name != "files"})


def _checksum(tree: Mapping[str, Any]) -> str:
    """The checksum of the canonical JSON of all keys but `self`: sorted, without spaces, in ASCII."""
    return f"{crc32(json.dumps(tree, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _wrong(tree: Mapping[str, Any]) -> str | None:
    """Say what keeps the content of a file from being a Resume; None if nothing does."""
    for each in fields(Resume):
        kind = int if each.name == "zero_stage" else dict
        if type(tree.get(each.name)) is not kind:
            return f"{each.name!r} is not {'a number' if kind is int else 'an object'}"
    for name, row in tree["files"].items():
        if not is_plain(name) or name == NAME:
            return f"{name!r} is not the name of a file within the folder"
        if (
            not isinstance(row, dict)
            or type(row.get("size")) is not int
            or row["size"] < 0
            or not _is_checksum(row.get("crc32"))
        ):
            return f"the file {name!r} is without its size or its checksum of 8 hexadecimal digits"
    return _wrong_within(tree)


KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "samples", "tokens", "good_steps", "overflows"), (int,)),
    **dict.fromkeys(("lr", "loss_scale", "hint"), (int, float)),
    **dict.fromkeys(("options", "skipped"), (dict,)),
}
"""The types of the entries of `state`, which the engine reads."""
NEEDED = ("step", "samples", "tokens", "good_steps", "loss_scale", "hint", "options")
"""The entries of `state` without which training cannot go on."""


def lacking(folder: Path, resume: Resume) -> CheckpointError | None:
    """Return the error that the folder's resume.json lacks entries which training needs to go on; None if it
    has them."""
    if missing := [key for key in NEEDED if key not in resume.state]:
        return damaged(folder / NAME, f"its 'state' has no {', '.join(map(repr, missing))}")
    return None


def _wrong_within(tree: Mapping[str, Any]) -> str | None:
    """Say what is wrong within the mappings that the engine reads; None if nothing is."""
    for key, value in tree["state"].items():
        if key in KINDS and (
            type(value) not in KINDS[key] or (type(value) is not dict and not 0 <= value < inf)
        ):
            return f"state: {key!r} is {value!r:.200}"
    counts = tree["state"].get("skipped", {})
    if not counts.keys() <= {"steps", "samples", "tokens"} or not all(
        type(count) is int for count in counts.values()
    ):
        return f"state: 'skipped' is {counts!r:.200}"
    options = tree["state"].get("options", {})
    groups = options.get("groups", [])
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and type(group.get("lr", 0.0)) in (int, float) for group in groups
    ):
        return f"state: the groups of 'options' are {groups!r:.200}"
    for key in ("made", "followed", "lost"):
        kind = str if key == "lost" else dict
        values = options.get(key, [])
        if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
            return f"state: {key!r} of 'options' is {values!r:.200}"
    if not isinstance(options.get("scheduler", {}), dict):
        return f"state: the scheduler of 'options' is {options['scheduler']!r:.200}"
    for rank, states in tree["rng"].items():
        if not isinstance(states, dict) or not all(
            isinstance(text, str) and _is_base64(text) for text in states.values()
        ):
            return f"rng: that of {rank!r} is no state of random numbers"
    positions = tree["data"].get("loaders", [])
    if not isinstance(positions, list) or not all(isinstance(position, dict) for position in positions):
        return f"data: 'loaders' is {positions!r:.200}"
    for key in ("batch", "precision"):
        if not isinstance(tree["config"].get(key, {}), dict):
            return f"config: {key!r} is not an object"
    return None


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and len(value) == 8 and all(digit in "0123456789abcdef" for digit in value)
