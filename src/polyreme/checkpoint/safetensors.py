"""The safetensors format: the header's length in eight bytes, the header in JSON, and the tensors, which fill
the rest of the file without a gap.

Invariant: a header that `parse` returns puts every byte behind it in exactly one tensor. No communication.
https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyreme.checkpoint.files import damaged, fill, parse_json, reading
from polyreme.checkpoint.sources import TensorInfo
from polyreme.errors import CheckpointError

ALIGN = 4096
"""Bytes: a page. The first tensor of a file that we write begins at a multiple of it."""
LIMIT = 100_000_000
"""Bytes. A longer header is refused, as by the safetensors library."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor's place: bytes [begin, end) of the file."""

    info: TensorInfo
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a file. data_start: the first byte behind it; entries: each tensor's place, by name, in
    the order of the header."""

    data_start: int
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((entry.end for entry in self.entries.values()), default=self.data_start)


def nbytes(info: TensorInfo) -> int:
    """Bytes of the whole tensor."""
    return math.prod(info.shape) * info.dtype.itemsize


def build(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Build the header of a file of `tensors`. Returns its bytes, up to the first tensor, and its content.
    The tensors come in the order given, but wider dtypes first, so that each lies at a multiple of its item
    size for readers that map the file.

    metadata: transformers wants {"format": "pt"} for a model. Raises CheckpointError for a dtype that the
    format does not have, and for a header that is too long."""
    table: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    at = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        info = tensors[name]
        if info.dtype not in CODES or name in table:
            raise CheckpointError(
                f"tensor {name!r} of {info.dtype} cannot be saved: "
                "safetensors has no such dtype, or not this name"
            )
        table[name] = {
            "dtype": CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [at, at + nbytes(info)],
        }
        at += nbytes(info)
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > LIMIT:
        raise CheckpointError(
            f"the header of {len(tensors)} tensors has {len(text)} "
            f"bytes, and may have {LIMIT}: divide them over more files"
        )
    start = 8 + len(text)
    entries = {
        name: Entry(tensors[name], *(start + at for at in row["data_offsets"]))
        for name, row in table.items()
        if name in tensors
    }
    return len(text).to_bytes(8, "little") + text, Header(start, entries, table["__metadata__"])


def parse(file: Path) -> Header:
    """Read the header of a safetensors file, and nothing else of it.

    Raises CheckpointError, with the file and the tensor, where it breaks the format, or the file has not the
    length that it says."""
    with reading(file):
        size = file.stat().st_size
    if size < 8:
        raise damaged(file, f"it has {size} bytes, and a safetensors file at least 8")
    length = bytearray(8)
    fill(file, memoryview(length), 0)
    count = int.from_bytes(length, "little")
    if count > min(LIMIT, size - 8):
        raise damaged(
            file, f"its header would have {count} bytes, of {size - 8} in the file and at most {LIMIT}"
        )
    text = bytearray(count)
    fill(file, memoryview(text), 8)
    return _header(text, size, file)


def divide(tensors: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Divide the names of `tensors`, in order, over files of at most `limit` bytes of tensors each; a larger
    tensor has a file of its own."""
    files: list[list[str]] = [[]]
    room = limit
    for name, info in tensors.items():
        if files[-1] and nbytes(info) > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= nbytes(info)
    return files


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of `count` files as Hugging Face writes them; a single one is `stem`.safetensors."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index(files: Mapping[str, Iterable[str]], tensors: Mapping[str, TensorInfo]) -> bytes:
    """Return the text of the index `stem`.safetensors.index.json. files: the names of the tensors in each
    file."""
    file_of = {name: file for file, names in files.items() for name in names}
    whole = {
        "metadata": {"total_size": sum(nbytes(tensors[name]) for name in file_of)},
        "weight_map": file_of,
    }
    return json.dumps(whole, indent=2, sort_keys=True).encode() + b"\n"


def _header(text: bytes | bytearray, size: int, file: Path) -> Header:
    """Read the header of a `file` of `size` bytes from its JSON `text`."""
    table, start = parse_json(text, file), 8 + len(text)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(file, "its __metadata__ is not of strings")
    entries = {name: _entry(name, row, start, file) for name, row in table.items()}
    at, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1][1:]):
        if entry.begin != at:
            where = "overlaps" if entry.begin < at else f"begins {entry.begin - at} bytes behind"
            raise damaged(file, f"tensor {name!r} {where} {before}")
        at, before = entry.end, f"tensor {name!r}"
    if at != size:
        raise damaged(file, f"{before} ends at byte {at}, and the file at {size}")
    return Header(start, entries, metadata)


def _entry(name: str, row: object, start: int, file: Path) -> Entry:
    if not isinstance(row, dict) or not {"dtype", "shape", "data_offsets"} <= row.keys():
        raise damaged(file, f"tensor {name!r} is without its dtype, shape or data_offsets")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise damaged(
            file, f"tensor {name!r} has the dtype {code!r}, which is not one of {', '.join(DTYPES)}"
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise damaged(file, f"tensor {name!r} has the shape {shape!r:.200} at {offsets!r:.200}")
    info = TensorInfo(tuple(shape), dtype)
    if offsets[1] - offsets[0] != nbytes(info):
        raise damaged(
            file,
            f"tensor {name!r} of shape {shape} in {code} has {nbytes(info)} "
            f"bytes, and {offsets[1] - offsets[0]} in the file",
        )
    return Entry(info, start + offsets[0], start + offsets[1])


def _are_counts(values: object) -> bool:
    if not isinstance(values, list) or len(values) > 64 or not {*map(type, values)} <= {int}:
        return False
    return min(values, default=0) >= 0 and max(values, default=0) < 1 << 63
