"""Loads a checkpoint of any layout and format into this rank's shards: only the ranges that it needs,
straight to their place.

Invariant: all that can be known to be wrong is known, on every rank, before any number of the model changes.
Communication: what each rank needs, and read of the files' checksums; what each lacks; nothing while the
model is filled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from polyreme.checkpoint.collective_errors import collectively
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.reader import Need, Preloaded, preload
from polyreme.checkpoint.sources import MASTER, MODEL, Source, TensorInfo
from polyreme.checkpoint.writer import combine
from polyreme.distributed.mesh import Axis
from polyreme.errors import named
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.region import Region, StridedRange, strided_ranges
from polyreme.models.huggingface import base_prefix, file_names

BLOCK = 1 << 20  # elements
THREADS = 2
SPARSE = 8
"""Runs that are this many times shorter than the distance between them are read one by one, others with what
lies between them."""


@dataclass(frozen=True)
class Wanted:
    """A tensor of this rank's: all its names, and the shape of the whole."""

    names: Sequence[str]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """name_of: by the first name of each tensor of this rank that the checkpoint has, its name there.
    missing, unexpected, unlike: over all ranks, what the checkpoint lacks, has besides, or has in another
    shape, each with the reason."""

    name_of: Mapping[str, str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    unlike: Sequence[str]

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        kinds = ("not in the checkpoint", "in the checkpoint, not in the model", "of another shape")
        parts = zip((self.missing, self.unexpected, self.unlike), kinds, strict=True)
        return "; ".join(f"{len(names)} {what}: {named(names)}" for names, what in parts if names)


def verify(source: Source, needed: Iterable[Need], axis: Axis) -> Source:
    """Compare all bytes with the checksums, each rank a part of them. Returns the source, which has in memory
    what it could keep of what is needed. Raises CheckpointError on every rank."""
    if isinstance(source, Directory):
        return preload(source, needed, axis) if source.resume else source
    parts = collectively(axis, lambda: source.contributions(axis.rank, axis.size))
    collectively(axis, lambda: source.compare([combine(each) for each in zip(*parts, strict=True)]))
    return source


def needs(
    source: Source,
    name: str,
    cut: Cut,
    rank: int,
    start: int,
    stop: int,
    targets: Mapping[str, Tensor],
    at: int,
) -> Iterator[Need]:
    """What of a tensor of the source, of all its kinds, those will read who have the elements [start, stop)
    of the flattened part that tensor-parallel rank `rank` has of it; for `verify`. A guess where a state has
    a shape of its own: all of it. targets: by kind, flat memory that gets those elements from its element
    `at` on."""
    own = strided_ranges(cut, rank, start, stop)
    for kind, tensors in source.tensors.items():
        if name not in tensors or (kind == MODEL and name in source.tensors.get(MASTER, {})):
            continue
        shape, dtype = tensors[name]
        is_alike = shape == cut.shape
        target = targets.get(kind)
        into = target if target is not None and target.dtype == dtype and is_alike else None
        for strided in own if is_alike else [StridedRange(0, 0, prod(shape))]:
            if strided.count == 1:
                yield Need(
                    kind, name, strided.whole, strided.whole + strided.size, into, at + strided.local - start
                )
            else:  # sparse ones are read when they are needed
                yield Need(
                    kind, name, strided.whole, strided.whole if _is_sparse(strided) else _stop(strided)
                )


def match(
    source: Source, wanted: Iterable[Wanted], renamed: Mapping[str, str], prefix: str, axis: Axis
) -> Match:
    """Which of the source's tensors are this rank's, by name. renamed: other names of some. prefix: what a
    model with a head has before the names of one without."""
    found = _weights(source)
    wanted = [Wanted(_with(renamed, tensor.names), tensor.shape) for tensor in wanted]
    name_of: dict[str, str] = {}
    missing, unlike = [], []
    for tensor in wanted:
        there = _name(found, tensor.names, prefix)
        if there is None:
            missing.append(tensor.names[0])
        elif wrong := [
            info.shape for info in _all(source, there) if tuple(info.shape) != tuple(tensor.shape)
        ]:
            unlike.append(f"{tensor.names[0]} {_shape(wrong[0])}, in the model {_shape(tensor.shape)}")
        else:
            name_of[tensor.names[0]] = there
    known = {name for each in wanted for name in each.names}
    known |= _prefixed(known, prefix)
    reports: list[Any] = axis.gather_objects([missing, unlike, sorted(known & found.keys())])
    everywhere = {name for report in reports for name in report[2]}
    told = [list(dict.fromkeys(name for report in reports for name in report[i])) for i in range(2)]
    return Match(name_of, told[0], [name for name in found if name not in everywhere], told[1])


def lacks(source: Source, model: nn.Module) -> list[str]:
    """Parameters and persistent buffers of a whole model that the source does not have, or not in this shape.
    No communication."""
    found, names_of, tensors = _weights(source), dict[int, list[str]](), model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    prefix, wrong = base_prefix(model), []
    renamed = file_names(model, {name: tensor.shape for name, tensor in tensors.items()})
    for names in (_with(renamed, names) for names in names_of.values()):
        there = _name(found, names, prefix)
        if there is None or tuple(found[there].shape) != tuple(tensors[names[0]].shape):
            wrong.append(names[0])
    return wrong


def unused(source: Source, model: nn.Module) -> list[str]:
    """Tensors of the source that a whole model has under no name, not even as a buffer that is not saved. No
    communication."""
    tensors = model.state_dict(keep_vars=True)
    known = {*tensors, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    known |= {*file_names(model, {name: tensor.shape for name, tensor in tensors.items()}).values()}
    known |= _prefixed(known, base_prefix(model))
    return [name for name in _weights(source) if name not in known]


def _prefixed(names: Collection[str], prefix: str) -> set[str]:
    """The names with and without what a model with a head has before those of one without."""
    return {name.removeprefix(prefix) for name in names if prefix} | {prefix + name for name in names}


def _with(renamed: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [*names, *(renamed[name] for name in names if name in renamed)]


def _weights(source: Source) -> Mapping[str, TensorInfo]:
    return source.tensors[MODEL] if MODEL in source.tensors else source.tensors.get(MASTER, {})


def _all(source: Source, name: str) -> list[TensorInfo]:
    """The weights of that name, of both kinds."""
    return [source.tensors[kind][name] for kind in (MODEL, MASTER) if name in source.tensors.get(kind, {})]


def _name(found: Mapping[str, TensorInfo], names: Sequence[str], prefix: str) -> str | None:
    """The name, with or without `prefix`, that the source has a tensor under."""
    others = (
        [name.removeprefix(prefix) if name.startswith(prefix) else prefix + name for name in names]
        if prefix
        else []
    )
    return next((name for name in (*names, *others) if name in found), None)


def fill(source: Source, regions: Iterable[tuple[str, str, Region]]) -> None:
    """Read (kind, name in the source) into each region's memory, in its dtype."""
    complete = source.complete if isinstance(source, Preloaded) else ()
    left = [each for each in regions if each[:2] not in complete]
    blocks = [
        (kind, name, region, block)
        for kind, name, region in left
        for strided in region.strided_ranges()
        for block in _blocks(strided)
    ]
    if isinstance(source, Preloaded):  # nearly all of it is in memory
        for block in blocks:
            _read(source, *block)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda each: _read(source, *each), blocks):
            pass


def _blocks(strided: StridedRange) -> Iterable[StridedRange]:
    """Pieces of which each, with what lies between its runs, is at most BLOCK elements."""
    if strided.count == 1:
        return strided.blocks(BLOCK)
    return strided.blocks(max(BLOCK * strided.size // strided.whole_step, 1))


def _read(source: Source, kind: str, name: str, region: Region, strided: StridedRange) -> None:
    target = region.read(strided)
    if strided.count == 1 or _is_sparse(strided):
        for i, row in enumerate(target):
            at = strided.whole + i * strided.whole_step
            found = source.read(kind, name, at, at + strided.size)
            if found.data_ptr() != row.data_ptr():  # else it was read into its place
                row.copy_(found)
        return
    cover = source.read(kind, name, strided.whole, _stop(strided))
    target.copy_(cover.as_strided((strided.count, strided.size), (strided.whole_step, 1)))


def _is_sparse(strided: StridedRange) -> bool:
    """Whether several are read one by one."""
    return strided.whole_step >= SPARSE * strided.size


def _stop(strided: StridedRange) -> int:
    """Where the last one ends in the whole tensor."""
    return strided.whole + (strided.count - 1) * strided.whole_step + strided.size


def fill_buffer(source: Source, name: str, buffer: Tensor) -> None:
    """Read a whole tensor."""
    buffer.data.copy_(source.read(MODEL, name, 0, buffer.numel()).view(buffer.shape))


def listed(shapes: Mapping[str, Sequence[int]]) -> str:
    """States by name, with their shapes."""
    return ", ".join(f"{kind} {_shape(shape)}" for kind, shape in sorted(shapes.items())) or "none"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
