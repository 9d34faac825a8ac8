"""The messages between the launcher of several hosts and the process that it starts on each of them.

To the host go lines of JSON. From it come frames, each of a kind, a rank and bytes, after MARK: what a login
prints before it is ignored. Invariant: a frame is whole or raises EOFError."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

MARK = b"\0polyreme 1\n"
MESSAGE, OUTPUT, ERRORS = range(3)
"""Kinds of frames: a message in JSON; a rank's stdout, and its stderr."""
_HEAD = struct.Struct(">BII")
LONGEST = 2**24
"""Most bytes of a frame."""


class Frame(NamedTuple):
    """A message, or output of a rank. `rank` is global, and 0 for a MESSAGE."""

    kind: int
    rank: int
    data: bytes


def pack(frame: Frame) -> bytes:
    """Return the frame's bytes."""
    return _HEAD.pack(frame.kind, frame.rank, len(frame.data)) + frame.data


def unpack(stream: BinaryIO) -> Frame:
    """Read the next frame. Raises EOFError where there is none, or other data."""
    kind, rank, length = _HEAD.unpack(_exactly(stream, _HEAD.size))
    if kind > ERRORS or length > LONGEST:
        raise EOFError
    return Frame(kind, rank, _exactly(stream, length))


def find_mark(stream: BinaryIO) -> bytes:
    """Read up to the end of MARK, and return what came before it. Raises EOFError with that where there is no
    mark."""
    before = b""
    while not before.endswith(MARK):
        byte = stream.read(1)
        if not byte or len(before) > LONGEST:
            raise EOFError(before)
        before += byte
    return before.removesuffix(MARK)


def message(**what: Any) -> Frame:
    """Return a MESSAGE frame with this object as JSON."""
    return Frame(MESSAGE, 0, json.dumps(what).encode())


def line(what: Mapping[str, Any]) -> bytes:
    """Return an object as a line of JSON."""
    return json.dumps(what).encode() + b"\n"


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
