"""What the launcher of several hosts and the process that it starts on each of them say to each other.

To the host go lines of JSON; from it come frames, of a kind, a rank and bytes, after MARK: whatever a login
prints before it is not ours. Invariant: a frame is whole or raises EOFError."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

MARK = b"\0polyreme 1\n"
TOLD, OUTPUT, ERRORS = range(3)
"""Kinds: an object in JSON; what a rank wrote to stdout, and to stderr."""
_HEAD = struct.Struct(">BII")
LONGEST = 2**24
"""Bytes of a frame."""


class Frame(NamedTuple):
    """`rank` counts among all hosts' (0 for TOLD)."""

    kind: int
    rank: int
    data: bytes


def pack(frame: Frame) -> bytes:
    """The frame's bytes."""
    return _HEAD.pack(frame.kind, frame.rank, len(frame.data)) + frame.data


def unpack(stream: BinaryIO) -> Frame:
    """The next frame. Raises EOFError where there is none, or none of ours."""
    kind, rank, length = _HEAD.unpack(_exactly(stream, _HEAD.size))
    if kind > ERRORS or length > LONGEST:
        raise EOFError
    return Frame(kind, rank, _exactly(stream, length))


def find_mark(stream: BinaryIO) -> bytes:
    """Read up to the end of MARK; returns what came before it. Raises EOFError, with what came, where there
    is none."""
    before = b""
    while not before.endswith(MARK):
        byte = stream.read(1)
        if not byte or len(before) > LONGEST:
            raise EOFError(before)
        before += byte
    return before.removesuffix(MARK)


def told(**what: Any) -> Frame:
    """A frame of an object."""
    return Frame(TOLD, 0, json.dumps(what).encode())


def line(what: Mapping[str, Any]) -> bytes:
    """An object as a line."""
    return json.dumps(what).encode() + b"\n"


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
