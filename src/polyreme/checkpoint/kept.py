"""Reads all bytes of a checkpoint once, compares them with their checksums, and keeps those that this rank needs in host memory.

Invariants: each byte is read for the comparison by exactly one rank; what is kept is what was compared; and no rank keeps more than its
share of half of the memory that is available (the rest is read again when it is needed).
Blocks are read into a little memory that is used again, and copied from there while the processor's cache has them: memory that is mapped
anew, in huge pages, may first have to be given by the host, which costs more than the disk (docs/LOG.md).
Communication: what each rank needs; what each read of the files' checksums.
"""

from __future__ import annotations

import contextlib
import socket
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyreme.checkpoint.directory import Directory
from polyreme.checkpoint.source import TensorInfo
from polyreme.checkpoint.together import together
from polyreme.checkpoint.write import combine
from polyreme.disk import ALIGNMENT, HUGE_PAGE, aligned
from polyreme.mesh import Axis
from polyreme.tiers.host import available

BLOCK = HUGE_PAGE
"""Bytes that are read at once, at most."""
READERS, TAKERS, BUFFERS = 6, 2, 14
"""Threads that only read, threads that compare and copy what was read, and blocks of memory that they share. If a thread did both, the disk
would wait for it: a virtual one may serve all that it was asked for before it tells of any (docs/LOG.md)."""
LARGEST = 16
"""Bytes of the largest number."""
SHARE = 1 << 26
"""Bytes. What several ranks need, or none, is divided among them in parts of at most as many."""

Range = tuple[int, int, int]
"""Bytes of a checkpoint: the number of the file, from where, to where."""


class Part(NamedTuple):
    """Bytes of a file for one rank to read. `wanted`: it needs them; `others`: so do others."""

    file: int
    begin: int
    end: int
    wanted: bool
    others: bool


class Need(NamedTuple):
    """The elements [start, stop) of a tensor. `into`: the memory that is to have them, flat and of the tensor's dtype, if that is known."""

    kind: str
    name: str
    start: int
    stop: int
    into: Tensor | None = None


class Kept:
    """A checkpoint of which a part is in memory: a `Source`. `ranges`: of which files, with the bytes of each."""

    def __init__(self, source: Directory, ranges: Sequence[tuple[Range, Tensor]]) -> None:
        self._source, self._ranges = source, sorted(ranges, key=lambda each: each[0])
        self._begins = [each[0][:2] for each in self._ranges]
        self.path: Path = source.path
        self.tensors: Mapping[str, Mapping[str, TensorInfo]] = source.tensors
        self.resume = source.resume

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """See `Source`. What is kept is not copied."""
        number, begin, end = self._source.place(kind, name, start, stop)
        i = bisect_right(self._begins, (number, begin)) - 1
        if i >= 0:
            (file, low, high), memory = self._ranges[i]
            if file == number and end <= high:
                return memory[begin - low : end - low].view(self.tensors[kind][name].dtype)
        return self._source.read(kind, name, start, stop)

    def contributions(self, part: int, parts: int) -> list[int]:
        """See `Source`."""
        return self._source.contributions(part, parts)

    def compare(self, contributions: Sequence[int]) -> None:
        """See `Source`."""
        self._source.compare(contributions)


def keep(source: Directory, needed: Iterable[Need], axis: Axis) -> Kept:
    """Read and compare all of it, with all ranks. needed: what this rank will read. Raises CheckpointError on every rank where anything is
    not as it was written; then what was to be read into the memory of others may be there, or not."""
    mine: list[tuple[Range, Tensor | None]] = []
    host, free = socket.gethostname(), available() or 0

    def report() -> dict[str, Any]:
        mine.extend((source.place(*need[:4]), need.into) for need in needed)
        return {"needed": joined(each for each, _ in mine), "host": host, "free": free}

    reports = together(axis, report)
    room = min(report["free"] for report in reports if report["host"] == host) // 2 // sum(report["host"] == host for report in reports)
    sizes = [file.size for file in source.files]
    parts = divide(sizes, [[tuple(each) for each in report["needed"]] for report in reports])[axis.rank]
    kept = _places(parts, sorted(mine, key=lambda each: each[0]), room)
    found = together(axis, lambda: _read(source, parts, kept))
    together(axis, lambda: source.compare([combine(each) for each in zip(*found, strict=True)]))
    return Kept(source, kept)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes, in order, in as few ranges as can be."""
    found: list[Range] = []
    for file, begin, end in sorted(ranges):
        if found and found[-1][0] == file and begin <= found[-1][2]:
            found[-1] = (file, found[-1][1], max(end, found[-1][2]))
        elif begin < end:
            found.append((file, begin, end))
    return found


def divide(sizes: Sequence[int], needed: Sequence[Sequence[Range]]) -> list[list[Part]]:
    """Which rank reads which bytes of files of these sizes, every byte by one: by one that needs it, if any does. needed: of each rank,
    `joined`."""
    bytes_of = [0] * len(needed)
    found: list[list[Part]] = [[] for _ in needed]
    events: list[dict[int, list[int]]] = [{} for _ in sizes]
    for rank, ranges in enumerate(needed):
        for file, begin, end in ranges:
            events[file].setdefault(begin, []).append(rank)
            events[file].setdefault(end, []).append(rank)
    for file, size in enumerate(sizes):
        wanting: set[int] = set()
        for begin, end in pairwise(sorted({0, size, *events[file]})):
            wanting ^= set(events[file].get(begin, ()))
            step = end - begin if len(wanting) == 1 else SHARE
            for at in range(begin, end, step):
                stop = min(at + step, end)
                rank = min(wanting or range(len(needed)), key=lambda rank: (bytes_of[rank], rank))
                bytes_of[rank] += stop - at
                found[rank].append(Part(file, at, stop, bool(wanting), len(wanting) > 1))
    return [_merged(parts) for parts in found]


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Those that lie end to end and are alike, together."""
    found: list[Part] = []
    for part in parts:
        before = found[-1] if found else None
        if before is not None and before.end == part.begin and (before.file, *before[3:]) == (part.file, *part[3:]):
            found[-1] = before._replace(end=part.end)
        else:
            found.append(part)
    return found


def _places(parts: Sequence[Part], needed: Sequence[tuple[Range, Tensor | None]], room: int) -> list[tuple[Range, Tensor]]:
    """Which bytes of the parts are to be kept, and where: those that are needed (in order), each once, and at most `room`."""
    found: list[tuple[Range, Tensor]] = []
    first, last = 0, (0, 0)
    for part in parts:
        while first < len(needed) and (needed[first][0][0], needed[first][0][2]) <= part[:2]:
            first += 1
        for (file, begin, end), into in islice(needed, first, None):
            if (file, begin) >= (part.file, part.end):
                break
            low, high = max(begin, part.begin), min(end, part.end)
            if last <= (file, low) < (file, high) and high - low <= room:
                found.append(((file, low, high), _memory(low - begin, high - begin, into)))
                room -= high - low
                last = file, high
    return found


def _memory(low: int, high: int, into: Tensor | None) -> Tensor:
    """For the bytes [low, high) of a need."""
    if into is not None:
        return into.view(torch.uint8)[low:high]
    skip = low % LARGEST  # so that numbers are where their dtype may begin
    return torch.empty(skip + high - low, dtype=torch.uint8)[skip:]


def _blocks(part: Part) -> Iterator[tuple[int, int]]:
    """Its bytes in parts of one size, with their pages at most BLOCK: they are cut where pages begin."""
    size = part.end - part.begin
    count = -(-size // (BLOCK - 2 * ALIGNMENT))
    cuts = [(part.begin + size * i // count) // ALIGNMENT * ALIGNMENT for i in range(1, count)]
    return pairwise([part.begin, *cuts, part.end])


def _read(source: Directory, parts: Sequence[Part], kept: Sequence[tuple[Range, Tensor]]) -> list[int]:
    """What the parts add to the checksum of each file. Fills what is `kept` of them, in order."""
    found = [0] * len(source.files)
    begins = [each[0][:2] for each in kept]
    waiting = deque((part.file, begin, end, part.others) for part in parts for begin, end in _blocks(part))
    free: SimpleQueue[Tensor] = SimpleQueue()
    for memory in aligned(BUFFERS * BLOCK).split(BLOCK):
        free.put(memory)

    def read_all() -> list[Future[tuple[int, int]]]:
        """The contributions to files of the blocks that this thread read."""
        opened, contributions = -1, []
        with contextlib.ExitStack() as files:
            while waiting:
                try:
                    file, begin, end, others = waiting.popleft()
                except IndexError:  # another was faster
                    break
                if file != opened:
                    files.close()
                    reading, opened = files.enter_context(contextlib.closing(source.open(file))), file
                memory = free.get()
                data = source.block(reading, begin, end, memory.numpy().data, others)
                contributions.append(takers.submit(take, file, begin, data, memory))
        return contributions

    def take(file: int, begin: int, data: memoryview, memory: Tensor) -> tuple[int, int]:
        try:
            end, numbers = begin + len(data), memory[begin % ALIGNMENT :]
            first, last = bisect_right(begins, (file, begin)) - 1, bisect_left(begins, (file, end))
            contribution = source.contribution(file, data, end)
            for (other, low, high), place in kept[max(first, 0) : last]:
                start, stop = max(begin, low), min(end, high)
                if other == file and start < stop:
                    place[start - low : stop - low].copy_(numbers[start - begin : stop - begin])
            return file, contribution
        finally:
            free.put(memory)

    with ThreadPoolExecutor(TAKERS) as takers, ThreadPoolExecutor(READERS) as readers:
        threads = [readers.submit(read_all) for _ in range(READERS)]
        try:
            for taken in (each for thread in threads for each in thread.result()):
                file, contribution = taken.result()
                found[file] ^= contribution
        finally:
            waiting.clear()
    return found
