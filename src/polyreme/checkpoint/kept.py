"""Reads all bytes of a checkpoint once, compares them with their checksums, and keeps those that this rank needs in host memory.

Invariants: each byte is read for the comparison by exactly one rank; what is kept is what was compared; and no rank keeps more than its
share of half of the memory that is available (the rest is read again when it is needed).
Communication: what each rank needs; what each read of the files' checksums.
"""

from __future__ import annotations

import queue
import socket
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from polyreme.checkpoint.direct import cover
from polyreme.checkpoint.directory import Directory
from polyreme.checkpoint.source import TensorInfo
from polyreme.checkpoint.together import together
from polyreme.checkpoint.write import combine
from polyreme.disk import ALIGNMENT, aligned
from polyreme.mesh import Axis
from polyreme.tiers.host import available

BLOCK = 1 << 22  # bytes read at once
THREADS = 2
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


def keep(source: Directory, needed: Iterable[tuple[str, str, int, int]], axis: Axis) -> Kept:
    """Read and compare all of it, with all ranks. needed: (kind, name, from which element, to which) of what this rank will read. Raises
    CheckpointError on every rank where anything is not as it was written."""
    mine: list[Range] = []
    together(axis, lambda: mine.extend(joined(source.place(*each) for each in needed)))
    host, free = socket.gethostname(), available() or 0
    reports: list[Any] = axis.gather_objects({"needed": mine, "host": host, "free": free})
    room = min(report["free"] for report in reports if report["host"] == host) // 2 // sum(report["host"] == host for report in reports)
    sizes = [file.size for file in source.files]
    parts = divide(sizes, [[tuple(each) for each in report["needed"]] for report in reports])[axis.rank]
    kept: list[tuple[Range, Tensor]] = []
    found = together(axis, lambda: _read(source, parts, room, kept))
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


def _read(source: Directory, parts: Sequence[Part], room: int, kept: list[tuple[Range, Tensor]]) -> list[int]:
    """What the parts add to the checksum of each file. Adds to `kept` those that are wanted, as far as there is room."""
    places: list[int | None] = []  # in one memory for all that is kept
    size = 0
    for part in parts:
        low, high = cover(part.begin, part.end)
        fits = part.wanted and size + high - low <= room
        places.append(size if fits else None)
        size += high - low if fits else 0
    memory = aligned(size)
    for part, place in zip(parts, places, strict=True):
        if place is not None:
            kept.append((part[:3], memory[place + part.begin % ALIGNMENT :][: part.end - part.begin]))
    found = [0] * len(source.files)
    spare: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(THREADS):
        spare.put(aligned(BLOCK))

    def blocks() -> Iterator[tuple[int, int, int, bool, Tensor | None]]:
        for part, place in zip(parts, places, strict=True):
            base, _ = cover(part.begin, part.end)
            begin = part.begin
            while begin < part.end:
                end = min(part.end, begin - begin % BLOCK + BLOCK)
                low, high = cover(begin, end)
                yield part.file, begin, end, part.others, None if place is None else memory[place + low - base : place + high - base]
                begin = end

    def read(block: tuple[int, int, int, bool, Tensor | None]) -> tuple[int, int]:
        file, begin, end, others, target = block
        scratch = spare.get() if target is None else None
        try:
            into = scratch if scratch is not None else target
            assert into is not None
            return file, source.contribution(file, begin, end, into.numpy().data, others)
        finally:
            if scratch is not None:
                spare.put(scratch)

    with ThreadPoolExecutor(THREADS) as pool:
        for file, contribution in pool.map(read, blocks()):
            found[file] ^= contribution
    return found
