"""Files of tensors that many ranks fill at the same time, each with what it holds, straight from its memory.

All headers are known before: so is every number's place in a file. The checksum of a file is made of what each rank wrote, without reading
it again (`crc`).
Invariant: a rank holds at most THREADS blocks of BLOCK bytes beside what it is given.
Communication: none; or, where one rank writes a whole file, blocks that are sent to it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import xor
from pathlib import Path

import torch
from torch import Tensor

from polyreme.checkpoint import crc, header
from polyreme.checkpoint.source import MODEL, TensorInfo
from polyreme.mesh import Axis
from polyreme.region import Region, Runs

BLOCK = 1 << 20  # bytes; writes of 4 MiB took four times as long (docs/LOG.md)
THREADS = 2
_SYNC_FILE_RANGE_WRITE = 2
_begin_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Has the disk begin with pages that would otherwise wait in memory for the fsync. Linux."""
if _begin_writing is not None:
    _begin_writing.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

Name = tuple[str, str]
"""Of a tensor: its kind, and its name in the checkpoint."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is: in which of the plan's files, from which byte on."""

    file: int
    begin: int
    itemsize: int


@dataclass(frozen=True)
class Plan:
    """The files of a checkpoint's tensors: paths within its folder, sizes in bytes and beginnings; and the indices that belong to them."""

    files: Sequence[str]
    sizes: Sequence[int]
    headers: Sequence[bytes]
    places: Mapping[Name, Place]
    indices: Mapping[str, bytes]

    @classmethod
    def of(cls, tensors: Mapping[str, Mapping[str, TensorInfo]], limit: int) -> Plan:
        """For `tensors` by kind and name, in files of at most `limit` bytes of tensors each."""
        plan = cls([], [], [], {}, {})
        for kind, infos in sorted(tensors.items()):
            infos = dict(sorted(infos.items()))
            stem = "model" if kind == MODEL else f"optimizer/{kind}"
            groups = header.divide(infos, limit)
            names = header.file_names(stem, len(groups))
            for file, group in zip(names, groups, strict=True):
                beginning = header.build({name: infos[name] for name in group}, {"format": "pt"} if kind == MODEL else None)
                found = header.decode(beginning, Path(file))
                plan.places.update(  # type: ignore[attr-defined]
                    {(kind, name): Place(len(plan.files), entry.begin, entry.info.dtype.itemsize) for name, entry in found.entries.items()}
                )
                plan.files.append(file)  # type: ignore[attr-defined]
                plan.sizes.append(found.size)  # type: ignore[attr-defined]
                plan.headers.append(beginning)  # type: ignore[attr-defined]
            if len(groups) > 1:
                listed = {Path(file).name: group for file, group in zip(names, groups, strict=True)}
                plan.indices[f"{stem}.safetensors.index.json"] = header.index(listed, infos)  # type: ignore[index]
        return plan

    def create(self, folder: Path) -> None:
        """Make all files, each with its header and as long as it will be: a full disk is known here."""
        for file, size, beginning in zip(self.files, self.sizes, self.headers, strict=True):
            (folder / file).parent.mkdir(exist_ok=True)
            with (folder / file).open("xb", buffering=0) as made:
                made.write(beginning)
                os.posix_fallocate(made.fileno(), 0, size)
        for file, text in self.indices.items():
            (folder / file).write_bytes(text)


class Writer:
    """What one rank writes into the plan's files in `folder`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._open: dict[int, int] = {}

    def write(self, regions: Iterable[tuple[Name, Region]]) -> dict[int, int]:
        """Write what this rank owns of `regions`. Returns the contribution to the checksum of each file that got something."""
        blocks = [(self._plan.places[name], block, region) for name, region in regions for block in _blocks(region)]

        def put(each: tuple[Place, Runs, Region]) -> tuple[int, int]:
            place, block, region = each
            return self._block(place, block, _packed(block, region.data, region.start))

        for place, _, _ in blocks:
            self._descriptor(place.file)
        with ThreadPoolExecutor(THREADS) as pool:
            return self._sum(pool.map(put, blocks))

    def collect(self, regions: Sequence[tuple[Name, Region]], axis: Axis) -> dict[int, int]:
        """The same where each file is written by one rank alone, to which the others send what they own. All ranks must call."""
        mine: dict[Name, list[tuple[Region, Runs]]] = {}
        for name, region in regions:
            mine.setdefault(name, []).extend((region, block) for block in _blocks(region))
        told = axis.gather_objects([[*name, [list(vars(block).values()) for _, block in held]] for name, held in mine.items()])
        theirs = [{(kind, name): [Runs(*numbers) for numbers in blocks] for kind, name, blocks in each} for each in told]  # type: ignore[attr-defined]

        def blocks() -> Iterator[tuple[Place, Runs, Tensor]]:
            for name, place in self._plan.places.items():
                writer = place.file % axis.size
                for source, held in enumerate(theirs):
                    for i, block in enumerate(held.get(name, ())):
                        if source == axis.rank:
                            region, _ = mine[name][i]
                            packed = _packed(block, region.data, region.start)
                            if source == writer:
                                yield place, block, packed
                            else:
                                axis.send(packed.view(-1), writer).settle()
                        elif axis.rank == writer:
                            packed = torch.empty(block.elements * place.itemsize, dtype=torch.uint8)
                            axis.receive(packed, source).wait()
                            yield place, block, packed

        failed: list[OSError] = []  # the others go on sending: so does receiving

        def written() -> Iterator[tuple[int, int]]:
            for block in blocks():
                try:
                    yield self._block(*block)
                except OSError as error:
                    failed.append(error)

        found = self._sum(written())
        if failed:
            raise failed[0]
        return found

    def _sum(self, written: Iterable[tuple[int, int]]) -> dict[int, int]:
        """What was written, by file; which is synced."""
        found: dict[int, int] = {}
        try:
            for file, contribution in written:
                found[file] = found.get(file, 0) ^ contribution
            for descriptor in self._open.values():
                os.fsync(descriptor)
        finally:
            while self._open:
                os.close(self._open.popitem()[1])
        return found

    def _block(self, place: Place, runs: Runs, packed: Tensor) -> tuple[int, int]:
        """Write the runs, of which `packed` are the bytes. Returns the file, and the contribution to its checksum."""
        memory = packed.reshape(-1).numpy().data
        size, step = runs.size * place.itemsize, runs.whole_step * place.itemsize
        descriptor = self._descriptor(place.file)
        begin = place.begin + runs.whole * place.itemsize
        for i in range(runs.count):
            _write(descriptor, memory[i * size : (i + 1) * size], begin + i * step)
        if _begin_writing is not None and runs.count == 1:
            _begin_writing(descriptor, begin, (runs.count - 1) * step + size, _SYNC_FILE_RANGE_WRITE)
        behind = self._plan.sizes[place.file] - (begin + (runs.count - 1) * step + size)
        return place.file, crc.comb(memory, size, step - size if runs.count > 1 else 0, behind)

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._folder / self._plan.files[file], os.O_WRONLY)
        return self._open[file]


def _blocks(region: Region) -> Iterator[Runs]:
    for runs in region.runs(owned=True):
        yield from runs.blocks(BLOCK // region.data.dtype.itemsize)


def _packed(runs: Runs, data: Tensor, start: int) -> Tensor:
    """The bytes of the runs, one behind the other, on the CPU; those of one run are where they were, if they were there."""
    return runs.of(data, start).cpu().contiguous().view(torch.uint8)


def _write(descriptor: int, memory: memoryview, at: int) -> None:
    while memory:
        count = os.pwrite(descriptor, memory, at)
        memory, at = memory[count:], at + count


def combine(contributions: Iterable[int]) -> int:
    """Those of several ranks to one file."""
    return reduce(xor, contributions, 0)
