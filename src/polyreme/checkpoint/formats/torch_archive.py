"""Archives that `torch.save` writes, read without running anything of them.

Invariant: an object in an archive is a tensor, a plain value, or an inert stand-in for a class that is never
imported; what names any other class is a CheckpointError with the file and the class. No communication."""

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
    """An object of a class that is not imported: the arguments that it would have been made with, and its
    attributes."""

    args: tuple[Any, ...] = ()

    def __new__(cls, *args: Any) -> StandIn:
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any) -> None:
        pass


class ArchiveMember(NamedTuple):
    """One entry of an archive: bytes [start, stop) of a file, and their CRC-32 as it was written (0: not
    known)."""

    file: Path
    name: str
    start: int
    stop: int
    crc32: int


def load(file: Path, package: str) -> Any:
    """The object that a file holds. Its tensors are views of the mapped file: what is not used is not read.

    Objects of classes of `package` are `StandIn`s; of any other class, or for what is no archive,
    CheckpointError."""
    with reading(file):
        return _load(file, file, f"{package}.", mmap=True, map_location="cpu")


def load_part(file: Path, start: int, stop: int, data: bool = True) -> Any:
    """The same for an archive that is bytes [start, stop) of a file, of no package; without `data`, tensors
    are on the meta device."""
    with reading(file), _FileSlice(file, start, stop) as part:
        return _load(part, file, None, map_location="cpu" if data else "meta")


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
    """Let only what torch itself calls safe be unpickled inside, and what the function that it yields is
    given."""
    with _LOCK:  # torch has one list for the whole process
        before = serialization.get_safe_globals()
        serialization.clear_safe_globals()
        try:
            yield serialization.add_safe_globals
        finally:
            serialization.clear_safe_globals()
            serialization.add_safe_globals(before)


def members(file: Path, start: int, stop: int) -> list[ArchiveMember]:
    """The entries of the archive that is bytes [start, stop) of a file. CheckpointError where it is none."""
    found = []
    try:
        with reading(file), _FileSlice(file, start, stop) as part, zipfile.ZipFile(part) as archive:
            for entry in archive.infolist():
                part.seek(entry.header_offset)
                header = part.read(LOCAL_HEADER)
                # lengths of its name and its extra field
                lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                begin = start + entry.header_offset + LOCAL_HEADER + lengths
                if entry.compress_type != zipfile.ZIP_STORED or begin + entry.file_size > stop:
                    raise zipfile.BadZipFile(f"{entry.filename} is compressed, or beyond the end")
                found.append(ArchiveMember(file, entry.filename, begin, begin + entry.file_size, entry.CRC))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise damaged(file, f"bytes {start} to {stop} are no archive of torch.save ({error})") from None
    return found


def contributions(every: Sequence[ArchiveMember], part: int, parts: int) -> list[int]:
    """A number for each member: 0 if its bytes are as they were written, as far as is known, or if it is not
    in the `part`-th of `parts` shares."""
    own = sorted(range(len(every)), key=lambda i: every[i].start - every[i].stop)[part::parts]
    found = [0] * len(every)
    for i in own:
        found[i] = _difference(every[i]) if every[i].crc32 else 0
    return found


def compare(every: Sequence[ArchiveMember], differences: Sequence[int], path: Path) -> None:
    """CheckpointError where one of them is not 0."""
    wrong = [
        f"{each.file.name} ({each.name})"
        for each, difference in zip(every, differences, strict=True)
        if difference
    ]
    if wrong:
        raise damaged(path, f"other bytes than were written (by their CRC-32) are in {'; '.join(wrong)}")


def _difference(member: ArchiveMember) -> int:
    memory, found = memoryview(bytearray(min(CHUNK, member.stop - member.start))), 0
    for part in chunks(member, CHUNK):
        chunk = memory[: part.size]
        fill(member.file, chunk, part.start)
        found = zlib.crc32(chunk, found)
    return found ^ member.crc32


class _FileSlice(io.RawIOBase):
    """Bytes [start, stop) of a file, as a file."""

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
