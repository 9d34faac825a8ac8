"""Writes safetensors files that many ranks fill at the same time, each with the numbers that it holds,
straight from its memory.

All headers are known before the first write, and with them every number's place in a file. The checksum of a
file is combined from those of the ranks' writes, without reading the file again (`checksum`).
Invariant: a rank holds at most BUFFERS blocks of BLOCK bytes beside the regions it is given, unless their
owner wants these back before they are written.
Communication: none; or, where one rank writes a whole file, blocks that are sent to it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import itemgetter, xor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.checkpoint import checksum, safetensors
from polyreme.checkpoint.copy_on_write import BLOCK, BackgroundAccess, Job, JobQueue, Work
from polyreme.checkpoint.direct_reader import SMALL, DirectFile, cover
from polyreme.checkpoint.sources import MODEL, TensorInfo
from polyreme.distributed.mesh import Axis
from polyreme.files.direct_io import ALIGNMENT, padded
from polyreme.layout.intervals import Interval, cut_at_multiples, overlap, round_down, round_up
from polyreme.layout.region import Region, StridedRange

PACKERS, WRITERS, BUFFERS = 2, 6, 10
"""Threads that copy and compute checksums, threads that only write, and blocks of memory that they share
(bench/LOG.md)."""

Name = tuple[str, str]
"""A tensor's kind, and its name in the checkpoint."""


@dataclass(frozen=True)
class FilePosition:
    """The place of a tensor: the number of its file in the layout, its first byte there, and bytes per
    element."""

    file: int
    begin: int
    itemsize: int


@dataclass(frozen=True)
class FileLayout:
    """The files of a checkpoint's tensors: their paths within its folder, sizes in bytes and headers; the
    place of each tensor; and, by path, the text of each index file."""

    files: Sequence[str]
    sizes: Sequence[int]
    headers: Sequence[bytes]
    positions: Mapping[Name, FilePosition]
    indices: Mapping[str, bytes]

    @classmethod
    def of(
        cls, tensors: Mapping[str, Mapping[str, TensorInfo]], limit: int, weights: str = "model"
    ) -> FileLayout:
        """Lay out `tensors`, by kind and name, in files of at most `limit` bytes of tensors each; those of
        the weights begin with `weights`."""
        layout = cls([], [], [], {}, {})
        for kind, infos in sorted(tensors.items()):
            infos = dict(sorted(infos.items()))
            stem = weights if kind == MODEL else f"optimizer/{kind}"
            groups = safetensors.divide(infos, limit)
            names = safetensors.file_names(stem, len(groups))
            for file, group in zip(names, groups, strict=True):
                beginning, found = safetensors.build(
                    {name: infos[name] for name in group}, {"format": "pt"} if kind == MODEL else None
                )
                layout.positions.update(  # type: ignore[attr-defined]
                    {
                        (kind, name): FilePosition(len(layout.files), entry.begin, entry.info.dtype.itemsize)
                        for name, entry in found.entries.items()
                    }
                )
                layout.files.append(file)  # type: ignore[attr-defined]
                layout.sizes.append(found.size)  # type: ignore[attr-defined]
                layout.headers.append(beginning)  # type: ignore[attr-defined]
            if len(groups) > 1:
                listed = {Path(file).name: group for file, group in zip(names, groups, strict=True)}
                layout.indices[f"{stem}.safetensors.index.json"] = safetensors.index(listed, infos)  # type: ignore[index]
        return layout

    def create(self, folder: Path) -> None:
        """Make all files in their final size, with their headers. Raises OSError here if the disk is full."""
        for file, size, beginning in zip(self.files, self.sizes, self.headers, strict=True):
            (folder / file).parent.mkdir(exist_ok=True)
            with (folder / file).open("xb", buffering=0) as made:
                made.write(beginning)
                os.posix_fallocate(made.fileno(), 0, size)
        for file, text in self.indices.items():
            with (folder / file).open("xb") as made:
                made.write(text)


@dataclass(frozen=True)
class FileSegment:
    """The bytes [begin, end) of a file, within one of its BLOCKs. runs: the contiguous runs that they consist
    of, in order, each with its region."""

    file: int
    begin: int
    end: int
    runs: Sequence[tuple[StridedRange, Region]]

    @property
    def is_direct(self) -> bool:
        """Whether it is written by direct I/O, past the page cache."""
        return self.begin % ALIGNMENT == self.end % ALIGNMENT == 0 and self.end - self.begin >= SMALL


class Writer:
    """Writes the numbers of one rank into the layout's files in `folder`."""

    def __init__(self, layout: FileLayout, folder: Path) -> None:
        self._layout, self._folder = layout, folder
        self._open: dict[int, DirectFile] = {}
        self._found: dict[int, int] = {}
        self._left: Counter[int] = Counter()  # writes that each file still waits for; none in `collect`
        self._lock = threading.Lock()

    def write(
        self,
        regions: Iterable[tuple[Name, Region]],
        access: BackgroundAccess,
        stream: torch.cuda.Stream | None = None,
        beside: Work | None = None,
        room: int = 0,
    ) -> dict[int, int]:
        """Write the elements that this rank owns of `regions`, while `access` lets it read them. Returns, for
        each file that it wrote to, its contribution to the checksum. stream: for copies from a GPU. beside:
        called by this thread while others write. room: bytes for copies once the owner wants its memory."""
        jobs = self.jobs(regions)
        self._left = Counter(file for file, _ in jobs)
        try:
            JobQueue((job for _, job in jobs), access, stream, BUFFERS, room).perform(
                PACKERS, WRITERS, beside
            )
        finally:
            self._close()
        return self._found

    def jobs(self, regions: Iterable[tuple[Name, Region]]) -> list[tuple[int, Job]]:
        """List the writes to perform, each with the number of its file, file after file, so that each file is
        soon complete."""
        single: list[tuple[FilePosition, StridedRange, Region]] = []
        jobs: list[tuple[int, Job]] = []
        for name, region in regions:
            position = self._layout.positions[name]
            for strided in region.strided_ranges(owned=True):
                if strided.count == 1:
                    single.append((position, strided, region))
                    continue
                for block in strided.blocks(BLOCK // position.itemsize):
                    size = padded(block.elements * position.itemsize)
                    jobs.append(
                        (
                            position.file,
                            Job(
                                size,
                                partial(self._gather, position, block, region),
                                partial(self._put, position, block),
                            ),
                        )
                    )
        for segment in _segments(single):
            low, high = cover(segment.begin, segment.end)
            jobs.append(
                (
                    segment.file,
                    Job(high - low, partial(self._fill, segment), partial(self._put_segment, segment)),
                )
            )
        return sorted(jobs, key=itemgetter(0))

    def collect(
        self, regions: Sequence[tuple[Name, Region]], axis: Axis, beside: Work | None = None
    ) -> dict[int, int]:
        """Write as `write` does, where each file is written by one rank alone, to which the others send the
        elements they own. All ranks must call."""
        failed: list[OSError] = []  # the other ranks go on sending, so this one goes on receiving
        try:
            for block in self._collected(regions, axis):
                try:
                    self._count_strided(*block)
                    self._put(*block)
                except OSError as error:
                    failed.append(error)
            if failed:
                raise failed[0]
            for opened in self._open.values():
                opened.sync()
            if beside is not None:
                beside()
        finally:
            self._close()
        return self._found

    def _collected(
        self, regions: Sequence[tuple[Name, Region]], axis: Axis
    ) -> Iterator[tuple[FilePosition, StridedRange, Tensor]]:
        """Yield the blocks of the files that this rank writes, with their bytes; meanwhile send its blocks of
        other files to the ranks that write those."""
        mine: dict[Name, list[tuple[Region, StridedRange]]] = {}
        for name, region in regions:
            mine.setdefault(name, []).extend((region, block) for block in _blocks(region))
        gathered: list[Any] = axis.gather_objects(
            [
                [*name, [list(vars(block).values()) for _, block in blocks_of]]
                for name, blocks_of in mine.items()
            ]
        )
        blocks = [
            ((kind, name), source, i, StridedRange(*numbers))
            for source, each in enumerate(gathered)
            for kind, name, blocks_of in each
            for i, numbers in enumerate(blocks_of)
        ]
        order = {name: at for at, name in enumerate(self._layout.positions)}
        for name, source, i, block in sorted(blocks, key=lambda each: order[each[0]]):
            position = self._layout.positions[name]
            writer = position.file % axis.size
            if source == axis.rank:
                packed = _packed(block, mine[name][i][0])
                if source == writer:
                    yield position, block, packed
                else:
                    axis.send(packed.view(-1), writer).settle()
            elif axis.rank == writer:
                packed = torch.empty(block.elements * position.itemsize, dtype=torch.uint8)
                axis.receive(packed, source).wait()
                yield position, block, packed

    def _close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _fill(self, segment: FileSegment, memory: Tensor) -> Tensor:
        """Copy the segment's bytes into `memory`, at the same offset within a page as in the file, and count
        them. Returns them."""
        begin = end = segment.begin % ALIGNMENT
        for strided, region in segment.runs:
            size = strided.size * region.data.dtype.itemsize
            memory[end : end + size].view(region.data.dtype).copy_(region.read(strided).view(-1))
            end += size
        packed = memory[begin:end]
        self._count(
            segment.file,
            checksum.contribution(packed.numpy().data, self._layout.sizes[segment.file] - segment.end),
        )
        return packed

    def _gather(
        self, position: FilePosition, strided: StridedRange, region: Region, memory: Tensor
    ) -> Tensor:
        """Copy the runs' bytes end to end into `memory`, and count them. Returns them."""
        packed = memory[: strided.elements * position.itemsize]
        packed.view(region.data.dtype).view(strided.count, strided.size).copy_(region.read(strided))
        self._count_strided(position, strided, packed)
        return packed

    def _count_strided(self, position: FilePosition, strided: StridedRange, packed: Tensor) -> None:
        """Add the runs to the checksum of their file; `packed`: their bytes, end to end."""
        size, step = strided.size * position.itemsize, strided.whole_step * position.itemsize
        memory = packed.reshape(-1).numpy().data
        behind = self._layout.sizes[position.file] - position.begin - strided.whole * position.itemsize - size
        found = 0
        for i in range(strided.count):
            found ^= checksum.contribution(memory[i * size : (i + 1) * size], behind - i * step)
        self._count(position.file, found)

    def _count(self, file: int, contribution: int) -> None:
        with self._lock:
            self._found[file] = self._found.get(file, 0) ^ contribution

    def _put_segment(self, segment: FileSegment, packed: Tensor) -> None:
        """Write the segment's bytes, `packed`."""
        opened = self._file(segment.file)
        (opened.write if segment.is_direct else opened.write_cached)(packed.numpy().data, segment.begin)
        self._wrote(segment.file)

    def _put(self, position: FilePosition, strided: StridedRange, packed: Tensor) -> None:
        """Write the runs to their places; `packed`: their bytes, end to end."""
        memory = packed.reshape(-1).numpy().data
        size, step = strided.size * position.itemsize, strided.whole_step * position.itemsize
        opened = self._file(position.file)
        begin = position.begin + strided.whole * position.itemsize
        for i in range(strided.count):
            opened.write_cached(memory[i * size : (i + 1) * size], begin + i * step)
        self._wrote(position.file)

    def _wrote(self, file: int) -> None:
        """Count a write to the file; after the last one, flush the file to the disk and close it."""
        with self._lock:
            self._left[file] -= 1
            done = None if self._left[file] else self._open.pop(file)
        if done is not None:
            with contextlib.closing(done):
                done.sync()

    def _file(self, file: int) -> DirectFile:
        with self._lock:
            if file not in self._open:
                self._open[file] = DirectFile(self._folder / self._layout.files[file], write=True)
            return self._open[file]


def _segments(strided: Iterable[tuple[FilePosition, StridedRange, Region]]) -> list[FileSegment]:
    """Join runs that lie end to end in a file, and cut them at multiples of BLOCK; see `_paged`."""
    cut: list[tuple[int, int, int, StridedRange, Region]] = []
    for position, run, region in strided:
        first, size = position.begin + run.whole * position.itemsize, position.itemsize
        for begin, end in cut_at_multiples(Interval(first, first + run.size * size), BLOCK):
            cut.append((position.file, begin, end, _within(run, begin - first, end - first, size), region))
    cut.sort(key=lambda run: run[:3])
    joined: list[list[tuple[int, int, int, StridedRange, Region]]] = []
    for each in cut:
        if joined and (joined[-1][-1][0], joined[-1][-1][2]) == each[:2] and each[1] % BLOCK:
            joined[-1].append(each)
        else:
            joined.append([each])
    segments = [
        FileSegment(runs[0][0], runs[0][1], runs[-1][2], [run[3:] for run in runs]) for runs in joined
    ]
    return [page for each in segments for page in _paged(each)]


def _paged(segment: FileSegment) -> Iterator[FileSegment]:
    """Split off the whole pages in the middle, which can be written directly, from the bytes before and after
    them; yield the segment as it is where whole pages are few."""
    low, high = round_up(segment.begin, ALIGNMENT), round_down(segment.end, ALIGNMENT)
    if high - low < SMALL or (low, high) == (segment.begin, segment.end):
        yield segment
        return
    for begin, end in ((segment.begin, low), (low, high), (high, segment.end)):
        runs, at = [], segment.begin
        for run, region in segment.runs:
            size = region.data.dtype.itemsize
            if inside := overlap(Interval(begin - at, end - at), Interval(0, run.size * size)):
                runs.append((_within(run, *inside, size), region))
            at += run.size * size
        if runs:
            yield FileSegment(segment.file, begin, end, runs)


def _within(run: StridedRange, start: int, stop: int, itemsize: int) -> StridedRange:
    """The elements whose bytes are [start, stop) of a contiguous run."""
    if start == 0 and stop == run.size * itemsize:
        return run
    return StridedRange(
        run.local + start // itemsize, run.whole + start // itemsize, (stop - start) // itemsize
    )


def _blocks(region: Region) -> Iterator[StridedRange]:
    for strided in region.strided_ranges(owned=True):
        yield from strided.blocks(BLOCK // region.data.dtype.itemsize)


def _packed(strided: StridedRange, region: Region) -> Tensor:
    """The bytes of the runs, end to end, on the CPU; not copied where they already lie so."""
    return region.read(strided).cpu().contiguous().view(torch.uint8)


def combine(contributions: Iterable[int]) -> int:
    """Combine the contributions of several ranks to the checksum of one file."""
    return reduce(xor, contributions, 0)
