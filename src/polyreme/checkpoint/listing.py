"""Lists the contents of a checkpoint of any format, to be shown to people and programs. No communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import xor
from pathlib import Path
from typing import Any

import torch

from polyreme.checkpoint.formats.dcp import DCPCheckpoint
from polyreme.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.open import open_source
from polyreme.checkpoint.run_directory import RunDirectory
from polyreme.checkpoint.safetensors import nbytes
from polyreme.checkpoint.sources import MASTER, MODEL, Source, TensorInfo
from polyreme.errors import CheckpointError

SHARE = 1 << 28  # bytes compared with their checksums between two reports of progress


@dataclass(frozen=True)
class KindSummary:
    """The tensors of one kind: their number, elements, bytes, and dtypes as torch names them, the dtype with
    the most bytes first."""

    name: str
    tensors: int
    elements: int
    bytes: int
    dtypes: Sequence[str]


@dataclass(frozen=True)
class Row:
    """A tensor: its shape and dtype by kind; and, for an alias, the name of the tensor that it is."""

    name: str
    kinds: Mapping[str, TensorInfo]
    same_as: str | None = None


@dataclass(frozen=True)
class Listing:
    """The contents of a checkpoint.

    mesh: the size of each axis of the ranks that wrote it. state: how far training had come. others: keys
    that are not read. checksums: how many were compared. problem: the files that differ from what was
    written, in words; None if there are none."""

    path: Path
    format: str
    kinds: Sequence[KindSummary]
    tensors: Sequence[Row]
    mesh: Mapping[str, int] = field(default_factory=dict)
    zero_stage: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[str] = ()
    checksums: int = 0
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the listing as an object that JSON can hold."""

        def dtype(info: TensorInfo) -> str:
            return str(info.dtype).removeprefix("torch.")

        return {
            "path": str(self.path),
            "format": self.format,
            "mesh": self.mesh,
            "zero_stage": self.zero_stage,
            "state": self.state,
            "versions": self.versions,
            "kinds": [vars(kind) for kind in self.kinds],
            "tensors": [
                {
                    "name": row.name,
                    "kinds": {
                        kind: {"shape": list(info.shape), "dtype": dtype(info)}
                        for kind, info in row.kinds.items()
                    },
                    "same_as": row.same_as,
                }
                for row in self.tensors
            ],
            "others": list(self.others),
            "integrity": {"checksums": self.checksums, "problem": self.problem},
        }


def listing(path: Path, shares: Callable[[int], Iterable[int]] = range) -> Listing:
    """List the checkpoint at `path`, or the newest in the run's folder `path`, and compare all of its bytes
    with their checksums.

    shares: iterates over that many equal shares of the comparison, so that the caller can show progress.
    Raises CheckpointError where there is none that can be opened."""
    source = open_source(RunDirectory(path).newest() or path if path.is_dir() else path)
    checksums, problem = _check(source, shares)
    aliases: Mapping[str, str] = getattr(source, "aliases", {})
    by_name: dict[str, dict[str, TensorInfo]] = {}
    order = sorted(
        source.tensors, key=lambda kind: ((MODEL, MASTER).index(kind) if kind in (MODEL, MASTER) else 2, kind)
    )
    for kind in order:
        for name, info in source.tensors[kind].items():
            by_name.setdefault(name, {})[kind] = info
    return Listing(
        path=source.path,
        kinds=[
            _summary(kind, [info for name, info in source.tensors[kind].items() if name not in aliases])
            for kind in order
        ],
        tensors=[Row(name, kinds, aliases.get(name)) for name, kinds in by_name.items()],
        checksums=checksums,
        problem=problem,
        **_of_format(source),
    )


def _of_format(source: Source) -> dict[str, Any]:
    if isinstance(source, DeepSpeedCheckpoint):
        state = dict(source.state)
        versions = {"deepspeed": state.pop("deepspeed")} if "deepspeed" in state else {}
        return {
            "format": "DeepSpeed",
            "mesh": source.mesh,
            "zero_stage": source.zero_stage,
            "state": state,
            "versions": versions,
        }
    if isinstance(source, DCPCheckpoint):
        return {
            "format": "torch.distributed.checkpoint",
            "mesh": {"ranks": source.ranks},
            "state": source.state,
            "others": source.others,
        }
    resume = source.resume if isinstance(source, Directory) else None
    if resume is None:
        return {"format": "Hugging Face"}
    mesh = {name: size for name, size in resume.mesh.items() if isinstance(size, int)}
    return {
        "format": "Polyreme",
        "mesh": mesh,
        "zero_stage": resume.zero_stage,
        "state": resume.state,
        "versions": resume.versions,
    }


def _check(source: Source, shares: Callable[[int], Iterable[int]]) -> tuple[int, str | None]:
    """Return the number of checksums, and what they show to be wrong."""
    count = max(1, sum(nbytes(info) for infos in source.tensors.values() for info in infos.values()) // SHARE)
    combined: list[int] = []
    try:
        for share in shares(count):
            found = source.contributions(share, count)
            combined = list(map(xor, combined, found)) if combined else found
        if combined:
            source.compare(combined)
    except CheckpointError as error:
        return len(combined), str(error)
    return len(combined), None


def _summary(name: str, infos: Sequence[TensorInfo]) -> KindSummary:
    dtypes: dict[torch.dtype, int] = {}
    for info in infos:
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + nbytes(info)
    names = [str(dtype).removeprefix("torch.") for dtype in sorted(dtypes, key=lambda dtype: -dtypes[dtype])]
    return KindSummary(name, len(infos), sum(prod(info.shape) for info in infos), sum(dtypes.values()), names)
