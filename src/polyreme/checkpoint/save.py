"""Writes the model as a Hugging Face directory, which `from_pretrained` opens as it is.

Invariant: the directory at the path is complete, old or new, at any instant; a failure on rank 0 is an error on every rank.
Communication: rank 0 gathers whole tensors, one bucket at a time; one exchange at the end tells all ranks how it went.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyreme.errors import CheckpointError
from polyreme.mesh import Axis


def save(module: nn.Module, tensors: Iterator[tuple[list[str], Tensor]], path: Path, tokenizer: Any, writer: bool, axis: Axis) -> Path:
    """Write `module`'s `tensors` (each with all names that share it) to the directory `path`; `writer` is true on one rank.

    A Hugging Face model gets config.json, generation_config.json and the names and ties that transformers would save; with
    `tokenizer`, its files too. Any other module gets model.safetensors alone. Raises CheckpointError on every rank.
    """
    whole = {}
    for names, tensor in tensors:
        if writer:
            whole.update(dict.fromkeys(names, tensor.detach().cpu().clone()))
    failure = None
    if writer:
        try:
            _write(module, whole, path, tokenizer)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    for report in axis.gather_objects(failure):
        if report is not None:
            raise CheckpointError(f"the checkpoint {path} was not written: {report}")
    return path


def _write(module: nn.Module, tensors: dict[str, Tensor], path: Path, tokenizer: Any) -> None:
    unfinished, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    for leftover in (unfinished, old):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_pretrained: Any = getattr(module, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(unfinished, state_dict=tensors)
    else:
        _write_plain(tensors, unfinished / "model.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _write_plain(tensors: dict[str, Tensor], file: Path) -> None:
    """One safetensors file; of names that share a tensor the first is written, as the format has no sharing."""
    from safetensors.torch import save_file

    distinct: dict[int, str] = {}
    for name, tensor in tensors.items():
        distinct.setdefault(id(tensor), name)
    save_file({name: tensors[name].contiguous() for name in distinct.values()}, file, metadata={"format": "pt"})
