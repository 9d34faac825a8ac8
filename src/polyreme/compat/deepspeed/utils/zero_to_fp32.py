#!/usr/bin/env python
"""Convert a checkpoint that `engine.save_checkpoint` or DeepSpeed wrote to one state dict of fp32 weights:

python zero_to_fp32.py . weights/ --safe_serialization

A copy of this script lies beside checkpoints. It needs safetensors alone if Polyreme is not installed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from polyreme.checkpoint.open import open_source
    from polyreme.compat.deepspeed.refusal import ArgumentError
    from polyreme.compat.deepspeed.utils.rank_files import get_checkpoint_files as get_checkpoint_files
    from polyreme.compat.deepspeed.utils.rank_files import get_model_state_file as get_model_state_file
    from polyreme.compat.deepspeed.utils.rank_files import get_model_state_files as get_model_state_files
    from polyreme.compat.deepspeed.utils.rank_files import get_optim_files as get_optim_files
    from polyreme.errors import CheckpointError
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "polyreme":
        raise
    open_source = None  # type: ignore[assignment]
    ArgumentError = CheckpointError = ValueError  # type: ignore[assignment, misc]

_NAMES = {torch.float32: "float32 fp32", torch.float16: "float16 fp16", torch.bfloat16: "bfloat16 bf16"}
OUTPUT_DTYPE_NAMES = {name: dtype for dtype, names in _NAMES.items() for name in names.split()}
"""The dtypes that weights may be written in, by name."""
debug = False  # for scripts that set it


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint folder, by name, whole and in fp32, from the optimizer's masters
    where there are some. tag: which of its checkpoints; None: the one that `latest` names.
    exclude_frozen_parameters: only those that have masters or states. Raises CheckpointError for what cannot
    be read."""
    folder = _folder(Path(checkpoint_dir), tag)
    kinds, tied = _read_alone(folder) if open_source is None else _read(folder)
    masters, weights = kinds.get("master", {}), kinds.get("model", {})
    trained = {name for kind, named in kinds.items() if kind != "model" for name in named}
    found = {}
    for name, read in weights.items():
        if exclude_frozen_parameters and trained and name not in trained:
            continue
        numbers = masters.get(name, read)()
        found[name] = numbers.to(torch.float32 if numbers.is_floating_point() else numbers.dtype)
    return {**{name: found[first] for name, first in tied.items() if first in found}, **found}


Kinds = dict[str, dict[str, Callable[[], Tensor]]]
"""Functions that each read one tensor, by its name, for "model", "master" and each state of the optimizer."""


def _read(folder: Path) -> tuple[Kinds, dict[str, str]]:
    """Return the tensors of a checkpoint, and for each further name of a tied parameter the first."""
    source = open_source(folder)

    def reader(kind: str, name: str, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: source.read(kind, name, 0, prod(shape)).view(shape)

    kinds = {
        kind: {name: reader(kind, name, tuple(info.shape)) for name, info in infos.items()}
        for kind, infos in source.tensors.items()
    }
    resume = getattr(source, "resume", None)
    return kinds, _tied(resume.extra if resume else {})


def _read_alone(folder: Path) -> tuple[Kinds, dict[str, str]]:
    """Return the same without Polyreme, of a checkpoint that the script lies beside."""
    from safetensors import safe_open

    if not (folder / "resume.json").is_file():
        raise CheckpointError(
            f"{folder} has no resume.json, and other checkpoints need Polyreme to be installed"
        )
    resume = json.loads((folder / "resume.json").read_text("utf-8"))
    kinds: Kinds = {}
    for path, wanted in resume["files"].items():
        match = re.fullmatch(r"(?:optimizer/)?([^/]+?)(?:-\d{5}-of-\d{5})?\.safetensors", path)
        if match is None:
            continue
        if _checksum(folder / path) != wanted["crc32"]:
            raise CheckpointError(f"{folder / path} is damaged: its checksum is not that in resume.json")
        file = safe_open(folder / path, "pt")
        named = {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
        kinds.setdefault(match[1], {}).update(named)
    return kinds, _tied(resume["extra"])


def _tied(extra: Mapping[str, Any]) -> dict[str, str]:
    return dict(extra.get("deepspeed", {}).get("tied", {}))


def _checksum(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _output_dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.").lower()
    if name not in OUTPUT_DTYPE_NAMES:
        raise ArgumentError(
            f"dtype={dtype!r}, as which weights are not written: give one of {', '.join(OUTPUT_DTYPE_NAMES)}"
        )
    return OUTPUT_DTYPE_NAMES[name]


def to_torch_tensor(
    state_dict: Mapping[str, Tensor],
    return_empty_tensor: bool = False,
    dtype: str | torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a state dict, contiguous, those of floating point in `dtype`, or empty ones like
    them; one that has several names stays one. Raises ArgumentError for another dtype than weights are
    written as."""
    to = None if dtype is None else _output_dtype(dtype)
    made: dict[int, Tensor] = {}
    for tensor in state_dict.values():
        if id(tensor) not in made:
            wanted = to if to is not None and tensor.is_floating_point() else tensor.dtype
            like = torch.empty(tensor.shape, dtype=wanted)
            made[id(tensor)] = like if return_empty_tensor else tensor.contiguous().to(wanted)
    return {name: made[id(tensor)] for name, tensor in state_dict.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights to `output_dir`, as Hugging Face names them: pytorch_model.bin, or
    model.safetensors with `safe_serialization`, in several files beyond `max_shard_size`."""
    further = (max_shard_size, safe_serialization, tag, exclude_frozen_parameters)
    convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, "float32", *further)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the same, rounded to float16 or bfloat16 where `dtype` says so. max_shard_size None: one file."""
    from huggingface_hub import save_torch_state_dict

    _output_dtype(dtype)
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    weights = to_torch_tensor(weights, dtype=dtype)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {} if safe_serialization else {"filename_pattern": "pytorch_model{suffix}.bin"}
    most = sys.maxsize if max_shard_size is None else max_shard_size
    save_torch_state_dict(
        weights, output_dir, max_shard_size=most, safe_serialization=safe_serialization, **options
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Return `model` on the CPU with the checkpoint's fp32 weights."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _folder(folder: Path, tag: str | None) -> Path:
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            raise CheckpointError(f"{folder} has no file `latest`: name a checkpoint of it with tag=")
        with latest.open(encoding="utf-8") as opened:
            tag = opened.read(1024).strip()
    if tag in ("", ".", "..") or "/" in tag or not (folder / tag).is_dir():
        raise CheckpointError(f"{folder} has no checkpoint {tag!r}")
    return folder / tag


def arguments(description: str | None, argv: Sequence[str] | None = None, **dtype: Any) -> dict[str, Any]:
    """Return the arguments of the command line, or `argv`, by name. dtype: an option that the program has
    besides, as the keywords of `add_argument` by its name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint_dir", help="the folder with the file `latest`")
    parser.add_argument("output_dir", help="where the weights are written")
    for option, how in dtype.items():
        parser.add_argument(f"--{option}", required=True, **how)
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of a file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="the checkpoint, such as global_step1")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))
    del given["debug"]
    return given


def main() -> None:
    """Read the arguments and convert."""
    convert_zero_checkpoint_to_fp32_state_dict(**arguments(__doc__))


if __name__ == "__main__":
    main()
