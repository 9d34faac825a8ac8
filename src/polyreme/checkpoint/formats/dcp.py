"""Reads and writes the directories of `torch.distributed.checkpoint` (DCP).

`.metadata`, a pickle, says into which boxes each tensor is cut, and at which bytes of which `*.distcp` file
each box is, as an archive of `torch.save`. The pickle is read by an unpickler that knows only the metadata's
own classes, and makes inert objects of them.
Invariant: files are mapped, and `read` touches only the bytes asked for. No communication.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyreme.checkpoint.files import damaged, is_plain, locate, reading
from polyreme.checkpoint.formats import torch_archive
from polyreme.checkpoint.sources import MASTER, MODEL, Source, TensorInfo
from polyreme.errors import CheckpointError
from polyreme.layout.intervals import Interval, ceil_div, overlap

METADATA = ".metadata"
SMALL = 1 << 16  # bytes; larger objects that are no tensors are not loaded
OPTIMIZER_KEY = re.compile(r"(?:[^.]+\.)?optim\w*\.state\.(.+)\.([^.]+)")
RATE_KEY = re.compile(r"(?:[^.]+\.)?optim\w*\.param_groups\.(?:.+\.)?lr")
CELLS = 1 << 26  # chunks of a tensor: no run has so many, and a file that says so must not fill the memory
RATES = 64  # learning rates that are looked at: there may be one for each parameter

_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
STOOD_IN = {
    *(
        (_DCP, name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ),
    *((_DCP, f"{what}StorageMetadata") for what in ("Tensor", "Bytes", "Chunk")),
    *((_OLD, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(
        (module, f"{system}Path")
        for module in ("pathlib", "pathlib._local")
        for system in ("Posix", "Windows")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
"""The classes and functions that a `.metadata` names, all replaced by inert classes."""


class _Inert(torch_archive.StandIn):
    """A stand-in that keeps a pickled state which is not a dict, such as a tuple, in `args`."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        # new classes for every file, as a pickle could set attributes of them
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_Inert,), {}) for key in STOOD_IN}
        self._known |= {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict}
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get((module, name))
        if known is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            known = vars(torch)[name]
        if known is None:
            raise CheckpointError(
                f"{self._path} is refused, as it names {module}.{name}, "
                "which is none of DCP's classes and could run code"
            )
        return known


class _Chunk(NamedTuple):
    """A box of a tensor, and the bytes [start, stop) of the folder's file with its archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    stop: int


class DCPCheckpoint:
    """An open directory of `torch.distributed.checkpoint`: a `Source`.

    Weights are those under the key "model", as in `{"model": ..., "optim": ...}` from `get_state_dict` (also
    within an object such as "app"), or, if there are none, all tensors at the top; the optimizer's states are
    those under any "optim...". others: the keys that are neither. Opening raises CheckpointError for files
    that are damaged or refused."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = locate(self.path, METADATA)[0]
        try:
            with reading(file), file.open("rb") as opened:
                metadata = _Unpickler(opened, file).load()
        except CheckpointError:
            raise
        except Exception as error:  # a pickle that is damaged can raise anything
            raise damaged(file, f"it cannot be unpickled ({type(error).__name__}: {error})") from None
        self._sizes: dict[str, int] = {}
        try:
            self._open(metadata)
        except CheckpointError:
            raise
        except Exception as error:  # values may be of any type
            raise damaged(file, f"it is not as DCP writes it ({type(error).__name__}: {error})") from error
        self._mapped: dict[str, Tensor] = {}
        self._begins: dict[_Chunk, int] = {}
        self._covered: set[str] = set()

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """See `Source`."""
        if name not in self.tensors.get(kind, {}):
            raise CheckpointError(f"{self.path} has no {kind} of {name!r}")
        info, key = self.tensors[kind][name], self._keys[kind][name]
        if not 0 <= start <= stop <= prod(info.shape):
            raise CheckpointError(
                f"{self.path}: {name!r} has {prod(info.shape)} elements, not [{start}, {stop})"
            )
        shape, chunks = info.shape or (1,), self._chunks[key]
        if key not in self._covered:
            if not _covered(shape, chunks):
                raise damaged(self.path / METADATA, f"the parts of {key!r} leave gaps, or overlap")
            self._covered.add(key)
        # bytes, as those of a file need not be aligned
        out = torch.empty(stop - start, dtype=info.dtype).view(torch.uint8)
        for at, box in _boxes(shape, start, stop):
            target = out[at * info.dtype.itemsize :][: prod(box.sizes) * info.dtype.itemsize]
            for chunk in chunks:
                self._copy(key, info.dtype, chunk, box, target)
        return out.view(info.dtype)

    def contributions(self, share: int, shares: int) -> list[int]:
        """See `Source`; one number for each member of the tensors' archives, which have its CRC-32."""
        return torch_archive.contributions(self._members, share, shares)

    def compare(self, contributions: Sequence[int]) -> None:
        """See `Source`."""
        torch_archive.compare(self._members, contributions, self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The learning rates, and the plain values that the user saved, such as a step, by key."""
        found: dict[str, Any] = {}
        rates: set[float] = set()
        for path, (file, start, stop) in self._objects.items():
            rate = RATE_KEY.fullmatch(path) is not None
            if stop - start > SMALL or (len(rates) >= RATES if rate else ".param_groups." in path):
                continue
            try:
                value = torch_archive.load_range(self.path / file, start, stop)
            except CheckpointError:  # some object of the user's
                continue
            if rate and isinstance(value, int | float):
                rates.add(value)
            elif not rate and isinstance(value, int | float | str):
                found[path] = value
        return found | ({"lr": sorted(rates) if len(rates) > 1 else rates.pop()} if rates else {})

    @cached_property
    def ranks(self) -> int:
        """The number of processes that wrote it, by the names of its files."""
        return len({name.split("_")[2] for name in self._sizes if re.match(r"__\d+_", name)})

    @cached_property
    def _members(self) -> list[torch_archive.ArchiveMember]:
        chunks = [
            chunk for kind in self._keys.values() for key in kind.values() for chunk in self._chunks[key]
        ]
        return [
            member
            for chunk in chunks
            for member in torch_archive.members(self.path / chunk.file, chunk.start, chunk.stop)
        ]

    def _open(self, metadata: Any) -> None:
        """Check the metadata, and keep of it the chunks, objects, kinds and names."""
        locations = {
            (
                index.fqn,
                _ints(offset) if (offset := getattr(index, "offset", None)) is not None else None,
            ): self._locate(info)
            for index, info in metadata.storage_data.items()
        }
        paths: Mapping[str, Sequence[Any]] = getattr(metadata, "planner_data", None) or {}
        infos: dict[str, TensorInfo] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._objects: dict[str, tuple[str, int, int]] = {}
        for key, item in metadata.state_dict_metadata.items():
            if not hasattr(item, "chunks"):
                self._objects[key] = locations[key, None]
                continue
            infos[key] = TensorInfo(_ints(item.size), _dtype(item.properties.args[0]))
            boxes = [(_ints(chunk.offsets), _ints(chunk.sizes)) for chunk in item.chunks]
            self._chunks[key] = [
                _Chunk(
                    offsets or (0,), sizes or (1,), *(locations.get((key, offsets)) or locations[key, None])
                )
                for offsets, sizes in boxes
                if prod(sizes)
            ]
            for chunk in self._chunks[key]:
                if prod(chunk.sizes) * infos[key].dtype.itemsize > chunk.stop - chunk.start:
                    raise ValueError(f"{key!r} has parts of more bytes than there are")
            if sum(prod(chunk.sizes) for chunk in self._chunks[key]) != prod(infos[key].shape):
                raise damaged(self.path / METADATA, f"the parts of {key!r} leave gaps, or overlap")
        found = {key: _kind_and_name(paths.get(key, (key,))) for key in infos}
        if not any(known and known[0] == MODEL for known in found.values()):
            found |= {
                key: (MODEL, key)
                for key, known in found.items()
                if known is None and len(paths.get(key, (key,))) == 1
            }
        self.others = [key for key, known in found.items() if known is None]
        self._keys: dict[str, dict[str, str]] = {MODEL: {}}
        for key, known in found.items():
            if known is not None:
                self._keys.setdefault(known[0], {})[known[1]] = key
        self.tensors: Mapping[str, Mapping[str, TensorInfo]] = {
            kind: {name: infos[key] for name, key in names.items()} for kind, names in self._keys.items()
        }

    def _locate(self, info: Any) -> tuple[str, int, int]:
        """The file of one item, and its first byte and end there. Raises CheckpointError where it has
        fewer."""
        name, start, length = info.relative_path, *_ints((info.offset, info.length))
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.path / METADATA}: {name} is transformed by "
                f"{info.transform_descriptors}, which is not read"
            )
        if not is_plain(name):
            raise damaged(self.path / METADATA, f"{name!r} is not the name of a file within the folder")
        if name not in self._sizes:
            self._sizes[name] = locate(self.path, name)[1]
        if start + length > self._sizes[name]:
            raise damaged(
                self.path / name,
                f"it has {self._sizes[name]} bytes, and should have {start + length} or more",
            )
        return name, start, start + length

    def _copy(self, key: str, dtype: torch.dtype, chunk: _Chunk, box: _Box, target: Tensor) -> None:
        """Copy the elements that the chunk and the box share into `target`, the bytes of the box."""
        both = [
            overlap(Interval(a, a + n), Interval(b, b + m))
            for a, n, b, m in zip(chunk.offsets, chunk.sizes, box.offsets, box.sizes, strict=True)
        ]
        if not all(both):
            return
        source = self._bytes(key, dtype, chunk)
        width = dtype.itemsize
        views = []
        for tensor, whole in ((target, box), (source, chunk)):
            view = tensor.view(*whole.sizes[:-1], whole.sizes[-1] * width)
            for dim, inside in enumerate(both):
                scale = width if dim == len(both) - 1 else 1
                view = view.narrow(dim, (inside.start - whole.offsets[dim]) * scale, inside.size * scale)
            views.append(view)
        views[0].copy_(views[1])

    def _bytes(self, key: str, dtype: torch.dtype, chunk: _Chunk) -> Tensor:
        """The bytes of a chunk's elements, in row-major order: a view of the mapped file, or a copy where the
        file has another order."""
        if chunk.file not in self._mapped:
            file = str(self.path / chunk.file)
            self._mapped[chunk.file] = torch.from_file(
                file, shared=False, size=self._sizes[chunk.file], dtype=torch.uint8
            )
        mapped, count = self._mapped[chunk.file], prod(chunk.sizes) * dtype.itemsize
        if chunk not in self._begins:
            tensor = torch_archive.load_range(self.path / chunk.file, chunk.start, chunk.stop, data=False)
            data = [
                each
                for each in torch_archive.members(self.path / chunk.file, chunk.start, chunk.stop)
                if "/data/" in each.name
            ]
            if (
                not isinstance(tensor, Tensor)
                or (tuple(tensor.shape) or (1,), tensor.dtype) != (chunk.sizes, dtype)
                or len(data) != 1
            ):
                raise damaged(
                    self.path / chunk.file,
                    f"bytes {chunk.start} to {chunk.stop} are not the part of {key!r} that should be there",
                )
            if not tensor.is_contiguous():
                storage = mapped[data[0].start : data[0].stop].clone().view(dtype)
                return (
                    storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                    .reshape(-1)
                    .view(torch.uint8)
                )
            begin = data[0].start + int(tensor.storage_offset()) * dtype.itemsize
            if begin + count > data[0].stop:
                raise damaged(
                    self.path / chunk.file, f"the part of {key!r} at byte {chunk.start} goes beyond its end"
                )
            self._begins[chunk] = begin
        return mapped[self._begins[chunk] :][:count]


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r:.200} are not sizes")
    return tuple(values)


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value!r:.200} is not a dtype")
    return value


def _kind_and_name(path: Sequence[Any]) -> tuple[str, str] | None:
    """The kind and name of a tensor, from the keys that lead to it in the saved objects; None where they tell
    neither."""
    names = [str(name) for name in path]
    for depth in (0, 1):
        if len(names) > depth + 1 and names[depth] == "model":
            return MODEL, ".".join(names[depth + 1 :])
    match = OPTIMIZER_KEY.fullmatch(".".join(names))
    return (match[2], match[1]) if match else None


class _Box(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, _Box]]:
    """Cut the elements [start, stop) of a flattened tensor into boxes, in order. Yields each with the number
    of elements before it."""
    if start >= stop:
        return
    row = prod(shape[1:])
    first, last = ceil_div(start, row), stop // row  # whole rows
    if first > last:  # within one row
        for at, box in _boxes(shape[1:], start - last * row, stop - last * row):
            yield at, _Box((last, *box.offsets), (1, *box.sizes))
        return
    for at, box in _boxes(shape[1:], row - (first * row - start), row) if first * row > start else ():
        yield at, _Box((first - 1, *box.offsets), (1, *box.sizes))
    if last > first:
        yield first * row - start, _Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    for at, box in _boxes(shape[1:], 0, stop - last * row):
        yield at + last * row - start, _Box((last, *box.offsets), (1, *box.sizes))


def _covered(shape: tuple[int, ...], chunks: Sequence[_Chunk]) -> bool:
    """Whether each element is in exactly one of the chunks."""
    ends = [tuple(map(sum, zip(chunk.offsets, chunk.sizes, strict=True))) for chunk in chunks]
    if any(end > size for each in ends for end, size in zip(each, shape, strict=True)):
        return False
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        return False
    if len(chunks) <= 1:
        return True
    edges = [
        sorted({each[dim] for each in (*ends, *(chunk.offsets for chunk in chunks))})
        for dim in range(len(shape))
    ]
    index = [{edge: i for i, edge in enumerate(each)} for each in edges]
    counts = [len(each) - 1 for each in edges]
    if prod(counts) > CELLS:
        return False
    cells = torch.zeros(counts, dtype=torch.uint8)  # cells of the grid that all edges make
    for chunk, end in zip(chunks, ends, strict=True):
        cells[tuple(slice(at[a], at[b]) for at, a, b in zip(index, chunk.offsets, end, strict=True))] += 1
    return bool((cells == 1).all())


def write_dcp(source: Source, path: str | Path, param_groups: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write a checkpoint of any format as a directory of `torch.distributed.checkpoint`, in this process
    only, one tensor at a time. Returns its path.

    Its keys are those of `{"model": ..., "optim": ...}` with the dicts that torch's `get_state_dict` returns:
    "model.NAME", in full precision where the source has it, and "optim.state.NAME.KIND". param_groups: the
    optimizer's groups, in order, each with its hyperparameters and the names of its "params"; without them
    `torch.distributed.checkpoint.load` takes the states only with a planner that allows a partial load.
    Raises CheckpointError where the folder `path` is not empty."""
    path = Path(path)
    with reading(path):
        if path.exists() and any(path.iterdir()):
            raise CheckpointError(f"{path} is not empty: name a new folder for the checkpoint")
    # Not at the top: we use it as the library of a file format, not for communication.
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    locations: dict[str, tuple[str, str]] = {}
    tree: dict[str, Any] = {
        "model": {},
        "optim": {"state": {}, "param_groups": [dict(group) for group in param_groups]},
    }
    for kind, tensors in source.tensors.items():
        for name, info in tensors.items():
            empty = torch.empty(info.shape, dtype=info.dtype, device="meta")
            if kind in (MODEL, MASTER):
                if kind == MASTER or name not in source.tensors.get(MASTER, ()):
                    tree["model"][name], locations[f"model.{name}"] = empty, (kind, name)
            else:
                tree["optim"]["state"].setdefault(name, {})[kind] = empty
                locations[f"optim.state.{name}.{kind}"] = (kind, name)

    class Planner(DefaultSavePlanner):
        """Reads each tensor from the source when it is written."""

        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.type == WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            kind, name = locations[write_item.index.fqn]
            shape = source.tensors[kind][name].shape
            return source.read(kind, name, 0, prod(shape)).view(shape)

    with reading(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(tree, storage_writer=FileSystemWriter(path), planner=Planner(), no_dist=True)
    return path
