"""Verifies a checkpoint while it is read: compares all bytes with their checksums, and keeps in host memory
those that this rank needs.

Invariants: each byte is read for the comparison by exactly one rank; the bytes that are kept are those that
were compared; and no rank keeps more than its share of half of the memory that is available (the rest is read
again when it is needed). Blocks are read into a little memory that is used again, and copied from there while
they are in the processor's cache: newly mapped huge pages can cost more than the disk (bench/LOG.md). Blocks
in the page cache go straight to their place.
Communication: the ranges that each rank needs; its contribution to the files' checksums.
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
from polyreme.checkpoint.sources import TensorInfo, Tensors
from polyreme.checkpoint.writer import combine
from polyreme.distributed.mesh import Axis
from polyreme.files.direct_io import ALIGNMENT, HUGE_PAGE, aligned
from polyreme.layout.intervals import Interval, ceil_div, chunks, overlap, round_down, union
from polyreme.offload.host import report_memory, share

BLOCK = HUGE_PAGE
"""Most bytes of one read."""
THREADS = 3
"""Threads that read, compare and copy, each with one block of memory. More memory would not stay in the
processor's cache, and even a virtual disk is faster there (bench/LOG.md)."""
LARGEST = 16
"""Bytes of the largest number's dtype."""
SHARE = 1 << 26
"""Most bytes that go to one rank at once of a range that several ranks need, or none."""

Range = tuple[int, int, int]
"""Bytes of a checkpoint: the number of the file, from where, to where."""


class FileRange(NamedTuple):
    """Bytes [begin, end) of a file for one rank to read. wanted: this rank needs them; else no rank does.
    others: other ranks need them, too."""

    file: int
    begin: int
    end: int
    wanted: bool
    others: bool


class Need(NamedTuple):
    """The elements [start, stop) of a tensor, perhaps none, that a rank will read. into: flat memory of the
    tensor's dtype, not in use yet, that gets them from its element `at` on; None where that is not known."""

    kind: str
    name: str
    start: int
    stop: int
    into: Tensor | None = None
    at: int = 0


class PreloadedRange(NamedTuple):
    """A range of a file, and the memory with its bytes."""

    range: Range
    memory: Tensor


class Preloaded:
    """A checkpoint with some of its ranges in memory: a `Source`."""

    def __init__(self, source: Directory, ranges: Sequence[PreloadedRange]) -> None:
        self._source, self.ranges, self._begins = source, ranges, [cached.range[:2] for cached in ranges]
        self.complete: Collection[tuple[str, str]] = frozenset()
        """(kind, name) of the tensors of which this rank needs nothing more: all is in its `Need.into`."""
        self.path: Path = source.path
        self.tensors: Mapping[str, Mapping[str, TensorInfo]] = source.tensors
        self.resume = source.resume
        self.contributions, self.compare = source.contributions, source.compare

    def overlapping(self, file: int, begin: int, end: int) -> Sequence[PreloadedRange]:
        """Return the ranges that have any of these bytes, and perhaps one before that has none."""
        return self.ranges[
            max(bisect_right(self._begins, (file, begin)) - 1, 0) : bisect_left(self._begins, (file, end))
        ]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """See `Source`. Returns a view where the bytes are in memory."""
        number, begin, end = self._source.locate(kind, name, start, stop)
        i = bisect_right(self._begins, (number, begin)) - 1
        if i >= 0:
            (file, low, high), memory = self.ranges[i]
            if file == number and end <= high:
                return memory[begin - low : end - low].view(self.tensors[kind][name].dtype)
        return self._source.read(kind, name, start, stop)


def preload(source: Directory, needed: Iterable[Need], axis: Axis) -> Preloaded:
    """Read all bytes with all ranks, and compare them with their checksums. needed: what this rank will read.
    Raises CheckpointError on every rank where a file differs from what was written; memory named as `into`
    may have changed then."""
    mine: list[tuple[Range, Need]] = []

    def report() -> dict[str, Any]:
        mine.extend((source.locate(*need[:4]), need) for need in needed)
        return {"needed": joined(needed_range for needed_range, _ in mine), **report_memory()}

    reports = collectively(axis, report)
    ranges = [[tuple(each_range) for each_range in each["needed"]] for each in reports]
    own = divide([file.size for file in source.files], ranges)[axis.rank]
    preloaded = Preloaded(source, _assign(own, sorted(mine, key=lambda each: each[0]), share(reports)))
    if _nbytes(cached.range for cached in preloaded.ranges) == _nbytes(
        needed_range for needed_range, _ in mine
    ):
        preloaded.complete = {need[:2] for _, need in mine} - {
            need[:2] for _, need in mine if need.into is None
        }
    source.compare(_combined(collectively(axis, lambda: _read_ranges(source, own, preloaded))))
    return preloaded


def kept_bytes(tensors: Tensors, needed: Iterable[Need]) -> int:
    """Return the most bytes of host memory that `preload` keeps, beside what is named as `into`: where this
    rank reads all that it needs, and there is room. tensors: those of the source."""
    ranges: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for need in needed:
        if need.into is None:
            ranges.setdefault(need[:2], []).append(need[2:4])
    kept = 0
    for (kind, name), each in ranges.items():
        kept += tensors[kind][name].dtype.itemsize * sum(end - begin for begin, end in union(each))
    return kept


def _nbytes(ranges: Iterable[Range]) -> int:
    return sum(end - begin for _, begin, end in ranges)


def _combined(contributions: Sequence[Sequence[int]]) -> list[int]:
    """Combine the contributions of all ranks, file by file."""
    return [combine(each) for each in zip(*contributions, strict=True)]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same bytes in order, in the fewest ranges."""
    of_file: dict[int, list[tuple[int, int]]] = {}
    for file, begin, end in ranges:
        of_file.setdefault(file, []).append((begin, end))
    return [(file, *each) for file, found in sorted(of_file.items()) for each in union(found)]


def divide(sizes: Sequence[int], needed: Sequence[Sequence[Range]]) -> list[list[FileRange]]:
    """Divide the bytes of files of these sizes among the ranks, so that each byte is read by one rank, one
    that needs it if any does. needed: the `joined` ranges of each rank. Returns the ranges of each rank."""
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
    return [_merged(ranges) for ranges in found]


def _merged(ranges: Sequence[FileRange]) -> list[FileRange]:
    """Join neighbours that lie end to end in a file and are needed alike."""
    found: list[FileRange] = []
    for each in ranges:
        before = found[-1] if found else None
        if (
            before is not None
            and before.end == each.begin
            and (before.file, *before[3:]) == (each.file, *each[3:])
        ):
            found[-1] = before._replace(end=each.end)
        else:
            found.append(each)
    return found


def _assign(
    ranges: Sequence[FileRange], needed: Sequence[tuple[Range, Need]], room: int
) -> list[PreloadedRange]:
    """Choose which bytes of this rank's `ranges` to keep, and their memory: those that it needs (`needed` is
    in order), each once, and at most `room` bytes."""
    found: list[PreloadedRange] = []
    first, last = 0, (0, 0)
    for each in ranges:
        while first < len(needed) and (needed[first][0][0], needed[first][0][2]) <= each[:2]:
            first += 1
        for (file, begin, end), need in islice(needed, first, None):
            if (file, begin) >= (each.file, each.end):
                break
            low, high = overlap(Interval(begin, end), Interval(each.begin, each.end))
            if last <= (file, low) < (file, high) and high - low <= room:
                found.append(PreloadedRange((file, low, high), _memory(need, low - begin, high - begin)))
                room -= high - low
                last = file, high
    return found


def _memory(need: Need, low: int, high: int) -> Tensor:
    """The memory for the bytes [low, high) of a need: in `into` where that is known, else new."""
    if need.into is not None:
        base = need.at * need.into.itemsize
        return need.into.view(torch.uint8)[base + low : base + high]
    skip = low % LARGEST  # so that numbers are where their dtype may begin
    return torch.empty(skip + high - low, dtype=torch.uint8)[skip:]


def _blocks(whole: FileRange) -> Iterator[FileRange]:
    """Cut a range where pages begin, into blocks whose pages are at most BLOCK bytes."""
    size = whole.end - whole.begin
    count = ceil_div(size, BLOCK - 2 * ALIGNMENT)
    cuts = [round_down(whole.begin + size * i // count, ALIGNMENT) for i in range(1, count)]
    for begin, end in pairwise([whole.begin, *cuts, whole.end]):
        yield whole._replace(begin=begin, end=end)


def _read_ranges(source: Directory, ranges: Iterable[FileRange], preloaded: Preloaded) -> list[int]:
    """Read the ranges, in order, and fill the memory of `preloaded`. Returns their contribution to the
    checksum of each file."""
    blocks = deque(block for each in ranges for block in _blocks(each))

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
    """Read a block into `memory`, and copy the bytes that are kept to their place; or read it straight there,
    where all of it is in the page cache and has one place. Returns its contribution to the checksum."""
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
    """The memory of the bytes [start, stop) of the file, which the range covers."""
    return cached.memory[start - cached.range[1] : stop - cached.range[1]]
