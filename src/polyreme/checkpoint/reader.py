"""Verifies a checkpoint while it is read: all bytes once, compared with their checksums; those that this rank
needs are kept in host memory.

Invariants: each byte is read for the comparison by exactly one rank; what is kept is what was compared; and
no rank keeps more than its share of half of the memory that is available (the rest is read again when it is
needed). Blocks are read into a little memory that is used again, and copied from there while the processor's
cache has them: memory that is mapped anew, in huge pages, may first have to be given by the host, which costs
more than the disk (docs/LOG.md). What the page cache has goes straight to its place.
Communication: what each rank needs; what each read of the files' checksums.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyreme.checkpoint.collective_errors import collectively
from polyreme.checkpoint.direct_reader import DirectFile, cover
from polyreme.checkpoint.files import fill
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.sources import TensorInfo
from polyreme.checkpoint.writer import combine
from polyreme.distributed.mesh import Axis
from polyreme.files.direct_io import ALIGNMENT, HUGE_PAGE, aligned
from polyreme.layout.intervals import Interval, ceil_div, chunks, overlap, round_down, union
from polyreme.offload.host import report_memory, share

BLOCK = HUGE_PAGE
"""Bytes that are read at once, at most."""
THREADS = 3
"""Each reads into one block of memory, compares and copies. More memory would not stay in the processor's
cache, in which a virtual disk, too, is faster (docs/LOG.md)."""
LARGEST = 16
"""Bytes of the largest number."""
SHARE = 1 << 26
"""Bytes. What several ranks need, or none, is divided among them in parts of at most as many."""

Range = tuple[int, int, int]
"""Bytes of a checkpoint: the number of the file, from where, to where."""


class FileRange(NamedTuple):
    """Bytes of a file for one rank to read. `wanted`: it needs them; `others`: so do others."""

    file: int
    begin: int
    end: int
    wanted: bool
    others: bool


class Need(NamedTuple):
    """The elements [start, stop) of a tensor; there may be none. `into`: flat memory of the tensor's dtype
    that gets them from its element `at` on, if that is known: it is not in use."""

    kind: str
    name: str
    start: int
    stop: int
    into: Tensor | None = None
    at: int = 0


class PreloadedRange(NamedTuple):
    """Bytes of a file that are in memory, and where."""

    range: Range
    memory: Tensor


class Preloaded:
    """A checkpoint of which a part is in memory: a `Source`."""

    def __init__(self, source: Directory, ranges: Sequence[PreloadedRange]) -> None:
        self._source, self.ranges, self._begins = source, ranges, [cached.range[:2] for cached in ranges]
        self.complete: Collection[tuple[str, str]] = frozenset()
        """Kinds and names of tensors of which all that this rank needs is in the memory that was named for
        it."""
        self.path: Path = source.path
        self.tensors: Mapping[str, Mapping[str, TensorInfo]] = source.tensors
        self.resume = source.resume

    def overlapping(self, file: int, begin: int, end: int) -> Sequence[PreloadedRange]:
        """The ranges that have any of these bytes, and perhaps one that has none."""
        return self.ranges[
            max(bisect_right(self._begins, (file, begin)) - 1, 0) : bisect_left(self._begins, (file, end))
        ]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """See `Source`. What is kept is not copied."""
        number, begin, end = self._source.locate(kind, name, start, stop)
        i = bisect_right(self._begins, (number, begin)) - 1
        if i >= 0:
            (file, low, high), memory = self.ranges[i]
            if file == number and end <= high:
                return memory[begin - low : end - low].view(self.tensors[kind][name].dtype)
        return self._source.read(kind, name, start, stop)

    def contributions(self, part: int, parts: int) -> list[int]:
        """See `Source`."""
        return self._source.contributions(part, parts)

    def compare(self, contributions: Sequence[int]) -> None:
        """See `Source`."""
        self._source.compare(contributions)


def preload(source: Directory, needed: Iterable[Need], axis: Axis) -> Preloaded:
    """Read and compare all of it, with all ranks. needed: what this rank will read. Raises CheckpointError on
    every rank where anything is not as it was written; what was named `into` may be read then, or not."""
    mine: list[tuple[Range, Need]] = []

    def report() -> dict[str, Any]:
        mine.extend((source.locate(*need[:4]), need) for need in needed)
        return {"needed": joined(needed_range for needed_range, _ in mine), **report_memory()}

    reports = collectively(axis, report)
    ranges = [[tuple(each_range) for each_range in each["needed"]] for each in reports]
    parts = divide([file.size for file in source.files], ranges)[axis.rank]
    preloaded = Preloaded(source, _assign(parts, sorted(mine, key=lambda each: each[0]), share(reports)))
    if _nbytes(cached.range for cached in preloaded.ranges) == _nbytes(
        needed_range for needed_range, _ in mine
    ):
        preloaded.complete = {need[:2] for _, need in mine} - {
            need[:2] for _, need in mine if need.into is None
        }
    source.compare(_combined(collectively(axis, lambda: _read_parts(source, parts, preloaded))))
    return preloaded


def _nbytes(ranges: Iterable[Range]) -> int:
    return sum(end - begin for _, begin, end in ranges)


def _combined(contributions: Sequence[Sequence[int]]) -> list[int]:
    """The contributions of all ranks to each file, combined."""
    return [combine(each) for each in zip(*contributions, strict=True)]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes, in order, in as few ranges as can be."""
    of_file: dict[int, list[tuple[int, int]]] = {}
    for file, begin, end in ranges:
        of_file.setdefault(file, []).append((begin, end))
    return [(file, *part) for file, parts in sorted(of_file.items()) for part in union(parts)]


def divide(sizes: Sequence[int], needed: Sequence[Sequence[Range]]) -> list[list[FileRange]]:
    """Which rank reads which bytes of files of these sizes, every byte by one: by one that needs it, if any
    does. needed: of each rank, `joined`."""
    bytes_of = [0] * len(needed)
    found: list[list[FileRange]] = [[] for _ in needed]
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
            for at, stop in chunks(Interval(begin, end), step):
                rank = min(wanting or range(len(needed)), key=lambda rank: (bytes_of[rank], rank))
                bytes_of[rank] += stop - at
                found[rank].append(FileRange(file, at, stop, bool(wanting), len(wanting) > 1))
    return [_merged(parts) for parts in found]


def _merged(parts: Sequence[FileRange]) -> list[FileRange]:
    """The same parts, with those that lie end to end and are alike joined."""
    found: list[FileRange] = []
    for part in parts:
        before = found[-1] if found else None
        if (
            before is not None
            and before.end == part.begin
            and (before.file, *before[3:]) == (part.file, *part[3:])
        ):
            found[-1] = before._replace(end=part.end)
        else:
            found.append(part)
    return found


def _assign(
    parts: Sequence[FileRange], needed: Sequence[tuple[Range, Need]], room: int
) -> list[PreloadedRange]:
    """Which bytes of the parts to keep, and where: those that are needed (in order), each once, and at
    most `room`."""
    found: list[PreloadedRange] = []
    first, last = 0, (0, 0)
    for part in parts:
        while first < len(needed) and (needed[first][0][0], needed[first][0][2]) <= part[:2]:
            first += 1
        for (file, begin, end), need in islice(needed, first, None):
            if (file, begin) >= (part.file, part.end):
                break
            low, high = overlap(Interval(begin, end), Interval(part.begin, part.end))
            if last <= (file, low) < (file, high) and high - low <= room:
                found.append(PreloadedRange((file, low, high), _memory(need, low - begin, high - begin)))
                room -= high - low
                last = file, high
    return found


def _memory(need: Need, low: int, high: int) -> Tensor:
    """Memory for the bytes [low, high) of what is needed."""
    if need.into is not None:
        base = need.at * need.into.itemsize
        return need.into.view(torch.uint8)[base + low : base + high]
    skip = low % LARGEST  # so that numbers are where their dtype may begin
    return torch.empty(skip + high - low, dtype=torch.uint8)[skip:]


def _blocks(part: FileRange) -> Iterator[FileRange]:
    """The same bytes in pieces, each with its pages at most BLOCK, cut where pages begin."""
    size = part.end - part.begin
    count = ceil_div(size, BLOCK - 2 * ALIGNMENT)
    cuts = [round_down(part.begin + size * i // count, ALIGNMENT) for i in range(1, count)]
    for begin, end in pairwise([part.begin, *cuts, part.end]):
        yield part._replace(begin=begin, end=end)


def _read_parts(source: Directory, parts: Iterable[FileRange], preloaded: Preloaded) -> list[int]:
    """Read the parts, in order, and fill what is `preloaded` of them. Returns what they add to the checksum
    of each file."""
    blocks = deque(block for part in parts for block in _blocks(part))

    def work(memory: Tensor) -> list[int]:
        found, opened = [0] * len(source.files), -1
        with contextlib.ExitStack() as files:
            try:
                while True:
                    block = blocks.popleft()
                    if block.file != opened:
                        files.close()
                        file = files.enter_context(contextlib.closing(source.open(block.file)))
                        opened = block.file
                    found[block.file] ^= _read(source, file, block, memory, preloaded)
            except IndexError:  # there are no more
                return found
            except BaseException:
                blocks.clear()
                raise

    with ThreadPoolExecutor(THREADS) as threads:
        return _combined(list(threads.map(work, aligned(THREADS * BLOCK).split(BLOCK))))


def _read(source: Directory, file: DirectFile, block: FileRange, memory: Tensor, preloaded: Preloaded) -> int:
    """Read a block into the memory, and copy what is kept of it; or, where all of it is in the page cache and
    goes to one place, read it there. Returns what it adds to the checksum."""
    number, begin, end = block[:3]
    ranges = [cached for cached in preloaded.overlapping(number, begin, end) if cached.range[0] == number]
    is_cached = file.is_cached(*cover(begin, end))
    if is_cached and len(ranges) == 1 and ranges[0].range[1] <= begin and end <= ranges[0].range[2]:
        data = _memory_of(ranges[0], begin, end).numpy().data
        fill(file.path, data, begin)
        return source.contribution(number, data, end)
    data = source.block(file, begin, end, memory.numpy().data, is_cached or block.others)
    contribution, numbers = source.contribution(number, data, end), memory[begin % ALIGNMENT :]
    for cached in ranges:
        if inside := overlap(Interval(begin, end), Interval(*cached.range[1:])):
            _memory_of(cached, *inside).copy_(numbers[inside.since(begin)])
    return contribution


def _memory_of(cached: PreloadedRange, start: int, stop: int) -> Tensor:
    """The memory of the bytes [start, stop) of the range's file."""
    return cached.memory[start - cached.range[1] : stop - cached.range[1]]
