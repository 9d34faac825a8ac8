"""Reads archives that `torch.save` writes, without running any of their code.

Invariant: an object in an archive is a tensor, a plain value, or an inert stand-in for a class that is never
imported; an archive that names any other class raises CheckpointError with the file and the class. No
communication."""

from __future__ import annotations

import io
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import serialization

from polyreme.checkpoint.files import damaged, fill, reading
from polyreme.errors import CheckpointError
from polyreme.layout.intervals import chunks

CHUNK = 4 << 20  # bytes read at once for a checksum
LOCAL_HEADER = 30  # bytes before the name of a zip member


class StandIn:
    """Stands for an object of a class that is not imported: keeps its constructor's arguments and its
    attributes."""

    args: tuple[Any, ...] = ()

    def __new__(cls, *args: Any) -> StandIn:
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any) -> None:
        pass


class ArchiveMember(NamedTuple):
    """A member of an archive: bytes [start, stop) of a file, and the CRC-32 that the archive has for them (0:
    not known)."""

    file: Path
    name: str
    start: int
    stop: int
    crc32: int


def load(file: Path, package: str) -> Any:
    """Load the object in a file. Its tensors are views of the mapped file, so that unused ones are not read.

    Objects of classes of `package` become `StandIn`s. Raises CheckpointError for other classes, and for a
    file that is no archive."""
    with reading(file):
        return _load(file, file, f"{package}.", mmap=True, map_location="cpu")


def load_range(file: Path, start: int, stop: int, data: bool = True) -> Any:
    """Load the object in an archive that is bytes [start, stop) of a file. Raises CheckpointError as `load`
    does, for any class. Without `data`, tensors are on the meta device."""
    with reading(file), _FileSlice(file, start, stop) as archive:
        return _load(archive, file, None, map_location="cpu" if data else "meta")


def _load(source: Any, file: Path, prefix: str | None, **options: Any) -> Any:
    with _nothing_allowed() as allow:
        try:
            names = sorted(serialization.get_unsafe_globals_in_checkpoint(source))
            refused = [name for name in names if prefix is None or not name.startswith(prefix)]
            if not refused:
                if isinstance(source, _FileSlice):
                    source.seek(0)
                allow([(type(name, (StandIn,), {}), name) for name in names])
                return torch.load(source, weights_only=True, **options)
        except OSError:
            raise
        except Exception as error:
            raise damaged(
                file,
                "torch cannot read it as plain data "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            ) from None
    raise CheckpointError(
        f"{file} is refused, as it names {', '.join(refused)}: a class of "
        "a checkpoint's file could run code, so that none is imported. "
        "Save the checkpoint again without such objects"
    )


_LOCK = threading.Lock()


@contextmanager
def _nothing_allowed() -> Iterator[Callable[[list[Any]], None]]:
    """Allow inside only those classes to be unpickled that torch itself calls safe, and those given to the
    function that it yields."""
    with _LOCK:  # torch has one list for the whole process
        before = serialization.get_safe_globals()
        serialization.clear_safe_globals()
        try:
            yield serialization.add_safe_globals
        finally:
            serialization.clear_safe_globals()
            serialization.add_safe_globals(before)


def members(file: Path, start: int, stop: int) -> list[ArchiveMember]:
    """List the members of the archive that is bytes [start, stop) of a file. Raises CheckpointError where it
    is no archive."""
    found = []
    try:
        with reading(file), _FileSlice(file, start, stop) as opened, zipfile.ZipFile(opened) as archive:
            for entry in archive.infolist():
                opened.seek(entry.header_offset)
                header = opened.read(LOCAL_HEADER)
                # lengths of its name and its extra field
                lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                begin = start + entry.header_offset + LOCAL_HEADER + lengths
                if entry.compress_type != zipfile.ZIP_STORED or begin + entry.file_size > stop:
                    raise zipfile.BadZipFile(f"{entry.filename} is compressed, or beyond the end")
                found.append(ArchiveMember(file, entry.filename, begin, begin + entry.file_size, entry.CRC))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise damaged(file, f"bytes {start} to {stop} are no archive of torch.save ({error})") from None
    return found


def contributions(every: Sequence[ArchiveMember], share: int, shares: int) -> list[int]:
    """Compare the members of share number `share` of `shares`. Returns a number for each of all members: not
    0 if its bytes differ from its CRC-32."""
    own = sorted(range(len(every)), key=lambda i: every[i].start - every[i].stop)[share::shares]
    found = [0] * len(every)
    for i in own:
        found[i] = _difference(every[i]) if every[i].crc32 else 0
    return found


def compare(every: Sequence[ArchiveMember], differences: Sequence[int], path: Path) -> None:
    """Raise CheckpointError, with their names, where differences of members are not 0."""
    wrong = [
        f"{each.file.name} ({each.name})"
        for each, difference in zip(every, differences, strict=True)
        if difference
    ]
    if wrong:
        raise damaged(path, f"other bytes than were written (by their CRC-32) are in {'; '.join(wrong)}")


def _difference(member: ArchiveMember) -> int:
    memory, found = memoryview(bytearray(min(CHUNK, member.stop - member.start))), 0
    for interval in chunks(member, CHUNK):
        chunk = memory[: interval.size]
        fill(member.file, chunk, interval.start)
        found = zlib.crc32(chunk, found)
    return found ^ member.crc32


class _FileSlice(io.RawIOBase):
    """A file object over the bytes [start, stop) of a file."""

    def __init__(self, file: Path, start: int, stop: int) -> None:
        super().__init__()
        self._file = file.open("rb")
        self._start, self._size, self._at = start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
