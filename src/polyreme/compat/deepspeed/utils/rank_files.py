"""The files of a DeepSpeed checkpoint: one with the model states of each rank, and one with its optimizer
states.

Lightning reads from them what a checkpoint has beside the weights. Checkpoints of Polyreme have no such
files; for whoever asks they are written to a temporary folder, which goes with this process."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from polyreme.checkpoint.manifest import read
from polyreme.compat.deepspeed.saving import COUNTS, DOOR, from_json

_folders: list[tempfile.TemporaryDirectory[str]] = []


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the files with the optimizer states, which `torch.load` reads. For a checkpoint of Polyreme that
    is one file, with nothing but the ZeRO stage. Raises FileNotFoundError if there are none."""
    resume = read(Path(checkpoint_dir))
    if resume is None:
        return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")
    return [_written("zero_optim_states.pt", {"optimizer_state_dict": {"zero_stage": resume.zero_stage}})]


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the files with the model states, which `torch.load` reads. For a checkpoint of Polyreme that is
    one file, with the client state and the counts. Raises FileNotFoundError if there are none."""
    resume = read(Path(checkpoint_dir))
    if resume is None:
        return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")
    extra = resume.extra.get(DOOR, {})
    counts = {name: extra[name] for name in COUNTS if name in extra}
    return [_written("model_states.pt", {"module": {}, **counts, **from_json(extra.get("client_state", {}))})]


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return the file with the first rank's model states. Raises FileNotFoundError if there is none."""
    if read(Path(checkpoint_dir)) is not None:
        return get_model_state_files(checkpoint_dir)[0]
    name = f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt"
    if not (file := Path(checkpoint_dir, name)).is_file():
        raise FileNotFoundError(f"{file} is missing: name the folder of a checkpoint, such as global_step1")
    return str(file)


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """Return the files of a folder that fit the pattern, in the order of the numbers in their names. Raises
    FileNotFoundError if there are none."""
    files = sorted(map(str, Path(checkpoint_dir).glob(glob_pattern)), key=natural_keys)
    if not files:
        raise FileNotFoundError(
            f"{checkpoint_dir}: it has no files {glob_pattern}; name the folder of a checkpoint"
        )
    return files


def natural_keys(text: str) -> list[int | str]:
    """Return a key that sorts texts by the numbers in them: "rank_9" before "rank_10"."""
    parts: list[int | str] = [*re.split(r"(\d+)", text)]
    parts[1::2] = map(int, parts[1::2])
    return parts


def _written(name: str, value: dict[str, object]) -> str:
    _folders.append(tempfile.TemporaryDirectory(prefix="polyreme-states-"))
    file = Path(_folders[-1].name, name)
    torch.save(value, file)
    return str(file)
