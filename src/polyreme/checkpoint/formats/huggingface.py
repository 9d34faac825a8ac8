"""Reads a Hugging Face directory: our own checkpoints, and any other with safetensors in it.

`model.safetensors`, or several files with `model.safetensors.index.json`, hold the weights;
`optimizer/KIND.safetensors`, in the same way, hold one state each. A checkpoint of adapters only has their
weights, as `optimizer/model.safetensors`, and no others. With a `resume.json` the checkpoint is ours: every
file has a size and a checksum, and none may be missing or added. States without resume.json are refused;
weights without it, as people publish them, are read.
Invariant: opening reads only headers, and `read` only the bytes asked for, straight into the tensor. No
communication."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from polyreme.checkpoint import checksum
from polyreme.checkpoint.direct_reader import DirectFile
from polyreme.checkpoint.files import chunks, damaged, fill, is_plain, locate, read_json, reading
from polyreme.checkpoint.manifest import NAME as RESUME
from polyreme.checkpoint.manifest import File, read
from polyreme.checkpoint.safetensors import Entry, Header, parse
from polyreme.checkpoint.sources import MODEL, TensorInfo
from polyreme.errors import CheckpointError, named
from polyreme.layout.intervals import Interval, overlap

OPTIMIZER = "optimizer"
"""The folder of the optimizer's states."""
ADAPTERS = f"{OPTIMIZER}/{MODEL}"
"""The stem of the files of a checkpoint of adapters only."""
CHUNK = 1 << 20  # bytes read at once for a checksum
FILE = re.compile(r"(?<=[^/])(-\d+-of-\d+)?\.safetensors(\.index\.json)?$")  # the ending behind the stem


class Directory:
    """An open Hugging Face directory: a `Source`. headers: of its safetensors files, by path within it.
    resume: the content of resume.json, or None. files: those that it names, in the order of their paths.
    adapters_only: it has the weights of adapters and no others.

    Opening raises CheckpointError for every problem but wrong bytes in files of the right size: those are
    found by `contributions` and `compare`, where there is a resume.json."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with reading(self.path):
            if not self.path.is_dir():
                raise CheckpointError(f"{self.path} is not a folder")
        self._names = _listing(self.path, ".") + _listing(self.path, OPTIMIZER)
        self.resume = read(self.path)
        self._files: Mapping[str, File] = dict(sorted(self.resume.files.items())) if self.resume else {}
        self._paths, self.files = list(self._files), list(self._files.values())
        self._numbers = {name: i for i, name in enumerate(self._paths)}
        states = sorted(
            {
                FILE.sub("", name)
                for name in self._names
                if name.startswith(f"{OPTIMIZER}/") and FILE.search(name)
            }
        )
        if self.resume:
            self._check_files()
        elif states:
            raise CheckpointError(f"{self.path} has an optimizer's states and no "
                                  f"{RESUME}, without which they cannot be checked: "
                                  "copy it again, or take the folder "
                                  f"{OPTIMIZER} away to use the weights alone")  # fmt: skip
        self.headers: dict[str, Header] = {}
        self.adapters_only = ADAPTERS in states
        self._entries = {} if self.adapters_only else {MODEL: self._find("model")}
        for stem in states:
            self._entries.setdefault(PurePosixPath(stem).name, self._find(stem))
        self.tensors: Mapping[str, Mapping[str, TensorInfo]] = {
            kind: {name: entry.info for name, (_, entry) in found.items()}
            for kind, found in self._entries.items()
        }

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """See `Source`."""
        file, begin, end = self._range(kind, name, start, stop)
        memory = torch.empty(end - begin, dtype=torch.uint8)
        try:
            fill(self.path / file, memory.numpy().data, begin)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
        return memory.view(self.tensors[kind][name].dtype)

    def locate(self, kind: str, name: str, start: int, stop: int) -> tuple[int, int, int]:
        """Return the place of the elements [start, stop) of a tensor: the number of the file in `files`, and
        the first byte and the end there. Raises CheckpointError where the tensor has no such elements."""
        file, begin, end = self._range(kind, name, start, stop)
        return self._numbers[file], begin, end

    def open(self, file: int) -> DirectFile:
        """Open `files[file]` for `block`. The caller closes it."""
        path = self.path / self._paths[file]
        with reading(path):
            return DirectFile(path)

    def block(self, opened: DirectFile, begin: int, end: int, memory: memoryview, cached: bool) -> memoryview:
        """Read the bytes [begin, end) of a file that `open` returned into `memory` (see
        `DirectFile.read`)."""
        with reading(opened.path):
            return opened.read(memory, begin, end, cached)

    def contribution(self, file: int, data: memoryview, end: int) -> int:
        """Return the contribution of `data`, which ends at byte `end`, to the checksum of `files[file]`."""
        return checksum.contribution(data, self.files[file].size - end)

    def _range(self, kind: str, name: str, start: int, stop: int) -> tuple[str, int, int]:
        """Like `locate`, with the path of the file for its number."""
        if name not in self._entries.get(kind, {}):
            raise CheckpointError(f"{self.path} has no {kind} of {name!r}")
        file, (info, begin, end) = self._entries[kind][name]
        size = info.dtype.itemsize
        if not 0 <= start <= stop <= (end - begin) // size:
            raise CheckpointError(
                f"{self.path / file}: {name!r} has {(end - begin) // size} elements, not [{start}, {stop})"
            )
        return file, begin + start * size, begin + stop * size

    def contributions(self, share: int, shares: int) -> list[int]:
        """See `Source`; the files are in the order of their paths."""
        total = sum(file.size for file in self._files.values())
        low, high = total * share // shares, total * (share + 1) // shares
        found, before = [], 0
        for name, file in self._files.items():
            own = overlap(Interval(low - before, high - before), Interval(0, file.size))
            found.append(self._contribution(name, *own, file.size) if own else 0)
            before += file.size
        return found

    def compare(self, contributions: Sequence[int], among: Collection[int] | None = None) -> None:
        """See `Source`. among: the numbers of the files to compare; None: all."""
        wrong = [
            name
            for i, ((name, file), each) in enumerate(zip(self._files.items(), contributions, strict=True))
            if (among is None or i in among) and checksum.total(file.size, [each]) != file.crc32
        ]
        if wrong:
            raise damaged(
                self.path,
                "other bytes than were written (by their CRC-32) "
                f"are in {'; '.join(map(self._describe, wrong))}",
            )

    def _contribution(self, name: str, start: int, stop: int, size: int) -> int:
        state = 0
        for chunk in chunks(self.path / name, start, stop, memoryview(bytearray(min(CHUNK, stop - start)))):
            state = checksum.linear(chunk, state)
        return checksum.shift(state, size - stop)

    def _describe(self, name: str) -> str:
        """Describe a file in an error: its name, and the tensors in it."""
        if name not in self.headers:
            return name
        return f"{name} ({named([repr(tensor) for tensor in self.headers[name].entries], 3)})"

    def _check_files(self) -> None:
        """Compare the folder with resume.json: each file that it names is there in its size, and there is no
        other safetensors or JSON file. Raises CheckpointError where that does not hold."""
        problems = []
        for name, file in self._files.items():
            try:
                size = locate(self.path, name)[1]
            except CheckpointError as error:
                problems.append(str(error).removeprefix(f"{self.path}/"))
            else:
                if size != file.size:
                    problems.append(f"{name} was written with {file.size} bytes and has {size}")
        folders = {".", OPTIMIZER, *(str(PurePosixPath(name).parent) for name in self._files)}
        there = {
            name
            for folder in folders
            for name in _listing(self.path, folder)
            if name.endswith((".safetensors", ".json"))
        }
        extra = [
            f"{name!r} was not written with it: move it elsewhere"
            for name in sorted(there - self._files.keys() - {RESUME})
        ]
        if problems:
            raise damaged(self.path, "; ".join(problems + extra))
        if extra:
            raise CheckpointError(f"{self.path} is not as it was written: {'; '.join(extra)}")

    def _find(self, stem: str) -> dict[str, tuple[str, Entry]]:
        """Find the tensors of one kind. Returns the path of the file and the place in it, by name."""
        whole, listed = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        if whole in self._names:  # transformers, too, prefers it to an index
            return {name: (whole, entry) for name, entry in self._header(whole).entries.items()}
        if listed not in self._names:
            raise self._missing(stem)
        file = locate(self.path, listed)[0]
        file_of = read_json(file).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise damaged(file, "it has no weight_map, or an empty one")
        headers = {}
        for name, shard in file_of.items():
            if not is_plain(shard) or "/" in shard or not shard.endswith(".safetensors"):
                raise damaged(
                    file,
                    f"tensor {name!r} would be in {shard!r}, which is not "
                    "the name of a safetensors file in the same folder",
                )
            if shard not in headers:
                headers[shard] = self._header(str(PurePosixPath(stem).with_name(shard)))
            if name not in headers[shard].entries:
                raise damaged(file, f"tensor {name!r} would be in {shard}, which does not hold it")
        for shard, header in headers.items() if self.resume else ():
            for name in header.entries:
                if file_of.get(name) != shard:
                    raise damaged(file, f"{shard} holds the tensor {name!r}, which is not said to be there")
        return {
            name: (str(PurePosixPath(stem).with_name(shard)), headers[shard].entries[name])
            for name, shard in file_of.items()
        }

    def _header(self, name: str) -> Header:
        self.headers[name] = parse(locate(self.path, name)[0])
        return self.headers[name]

    def _missing(self, stem: str) -> CheckpointError:
        """Return the error that there are no files of `stem`; for weights in a pickle, with the way out."""
        pickles = [
            name for name in self._names if name.startswith("pytorch_model") and ".safetensors" not in name
        ]
        if stem == "model" and pickles:
            return CheckpointError(f"{self.path} has its weights in a pickle "
                                   f"({pickles[0]}), which could run code and is not read: "
                                   "if you trust it, open it with transformers "
                                   "and `save_pretrained` it as safetensors")  # fmt: skip
        return CheckpointError(
            f"{self.path} has no {stem}.safetensors, nor the index of several: "
            f"it has {named(self._names, 10) or 'no files'}"
        )


def _listing(folder: Path, inner: str) -> list[str]:
    """List the paths, relative to `folder`, of the entries of its folder `inner` ("." for itself); none if
    there is no such folder."""
    path = folder / inner
    with reading(path):
        return (
            sorted(str(PurePosixPath(inner) / entry.name) for entry in path.iterdir())
            if path.is_dir()
            else []
        )
