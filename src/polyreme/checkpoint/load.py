"""Loads a checkpoint of any layout and format into this rank's shards: only the ranges that it needs,
straight to their place.

Invariant: every error that can be found is raised, on every rank, before any number of the model changes.
Communication: the ranges that each rank needs; the files' checksums; the names that each rank does not find;
nothing while the model is filled."""

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
from polyreme.checkpoint.sources import MASTER, MODEL, Source, TensorInfo, Tensors
from polyreme.checkpoint.writer import combine
from polyreme.distributed.mesh import Axis
from polyreme.errors import named
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.region import Region, StridedRange, strided_ranges
from polyreme.models.huggingface import base_prefix, file_names

BLOCK = 1 << 20  # elements
THREADS = 2
SPARSE = 8
"""Runs whose distance is this many times their length, or more, are read one by one; others together with the
elements between them."""


@dataclass(frozen=True)
class Wanted:
    """A tensor that this rank has elements of: all its names, and the shape of the whole."""

    names: Sequence[str]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """The tensors of a model beside those of a checkpoint.

    name_of: the name in the checkpoint, by the first name of each tensor of this rank that it has. Over all
    ranks, missing: names that only the model has; unexpected: that only the checkpoint has; unlike: in both,
    with both shapes, where these differ."""

    name_of: Mapping[str, str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    unlike: Sequence[str]

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        problems = {
            "not in the checkpoint": self.missing,
            "in the checkpoint, not in the model": self.unexpected,
            "of another shape": self.unlike,
        }
        return "; ".join(f"{len(names)} {what}: {named(names)}" for what, names in problems.items() if names)


def verify(source: Source, needed: Iterable[Need], axis: Axis) -> Source:
    """Compare all bytes with their checksums, each rank a share of them. Returns the source, which keeps in
    memory as much of `needed` as has room. Raises CheckpointError on every rank where any bytes differ."""
    if isinstance(source, Directory):
        return preload(source, needed, axis) if source.resume else source
    found = collectively(axis, lambda: source.contributions(axis.rank, axis.size))
    collectively(axis, lambda: source.compare([combine(each) for each in zip(*found, strict=True)]))
    return source


def needs(
    tensors: Tensors,
    name: str,
    cut: Cut,
    rank: int,
    start: int,
    stop: int,
    targets: Mapping[str, Tensor],
    at: int,
) -> Iterator[Need]:
    """List, for `verify`, the elements that will be read of one of a source's tensors, of all kinds, for the
    elements [start, stop) of the flattened slice that tensor-parallel rank `rank` has of it. Of a state with
    another shape than the tensor's: all of it. targets: by kind, flat memory that gets those elements from
    its element `at` on."""
    own = strided_ranges(cut, rank, start, stop)
    for kind, infos in tensors.items():
        if name not in infos or (kind == MODEL and name in tensors.get(MASTER, {})):
            continue
        shape, dtype = infos[name]
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
    """Match the source's tensors with this rank's by name. All ranks must call. renamed: other names of some
    tensors. prefix: the prefix by which names in a model with a head differ from those without."""
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
    of_all = [list(dict.fromkeys(name for report in reports for name in report[i])) for i in range(2)]
    return Match(name_of, of_all[0], [name for name in found if name not in everywhere], of_all[1])


def lacks(source: Source, model: nn.Module) -> list[str]:
    """Return the names of parameters and persistent buffers of an undivided model that the source does not
    have, or has in another shape. No communication."""
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
    """Return the names of the source's tensors that an undivided model does not know, not even as a buffer
    that is not saved. No communication."""
    tensors = model.state_dict(keep_vars=True)
    known = {*tensors, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    known |= {*file_names(model, {name: tensor.shape for name, tensor in tensors.items()}).values()}
    known |= _prefixed(known, base_prefix(model))
    return [name for name in _weights(source) if name not in known]


def _prefixed(names: Collection[str], prefix: str) -> set[str]:
    """Each of the names both with the prefix and without it."""
    return {name.removeprefix(prefix) for name in names if prefix} | {prefix + name for name in names}


def _with(renamed: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [*names, *(renamed[name] for name in names if name in renamed)]


def _weights(source: Source) -> Mapping[str, TensorInfo]:
    return source.tensors[MODEL] if MODEL in source.tensors else source.tensors.get(MASTER, {})


def _all(source: Source, name: str) -> list[TensorInfo]:
    """The weights of that name: those of the computation, and the master copy."""
    return [source.tensors[kind][name] for kind in (MODEL, MASTER) if name in source.tensors.get(kind, {})]


def _name(found: Mapping[str, TensorInfo], names: Sequence[str], prefix: str) -> str | None:
    """The name under which the source has the tensor, with or without `prefix`; None if it has none."""
    others = (
        [name.removeprefix(prefix) if name.startswith(prefix) else prefix + name for name in names]
        if prefix
        else []
    )
    return next((name for name in (*names, *others) if name in found), None)


def fill(source: Source, regions: Iterable[tuple[str, str, Region]]) -> None:
    """Read into the memory of each (kind, name in the source, region), in the region's dtype."""
    complete = source.complete if isinstance(source, Preloaded) else ()
    blocks = [
        (kind, name, region, block)
        for kind, name, region in regions
        if (kind, name) not in complete
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
    """Cut into pieces of at most BLOCK elements, those between the runs counted."""
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
    """Whether the runs are so far apart that they are read one by one."""
    return strided.whole_step >= SPARSE * strided.size


def _stop(strided: StridedRange) -> int:
    """The element of the whole tensor at which the last run ends."""
    return strided.whole + (strided.count - 1) * strided.whole_step + strided.size


def fill_buffer(source: Source, name: str, buffer: Tensor) -> None:
    """Read the tensor `name` into a buffer."""
    buffer.data.copy_(source.read(MODEL, name, 0, buffer.numel()).view(buffer.shape))


def listed(shapes: Mapping[str, Sequence[int]]) -> str:
    """List states with their shapes, for a message."""
    return ", ".join(f"{kind} {_shape(shape)}" for kind, shape in sorted(shapes.items())) or "none"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
