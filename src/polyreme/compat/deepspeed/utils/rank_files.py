"""DeepSpeed's files of a checkpoint: one of each rank's model and optimizer states.

Lightning reads what is beside the weights from them. Checkpoints of this door have no such files: they are
written for whoever asks, to a folder that ends with this process."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from polyreme.checkpoint.manifest import read
from polyreme.compat.deepspeed.saving import COUNTS, DOOR, from_json

_folders: list[tempfile.TemporaryDirectory[str]] = []


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Files of `torch.save`, of which each has the ZeRO stage (`optimizer_state_dict`); of a checkpoint of
    this door it has no more. Raises FileNotFoundError where there are none."""
    resume = read(Path(checkpoint_dir))
    if resume is None:
        return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")
    return [_written("zero_optim_states.pt", {"optimizer_state_dict": {"zero_stage": resume.zero_stage}})]


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """The same for the rest, which of a checkpoint of this door are client state and counts."""
    resume = read(Path(checkpoint_dir))
    if resume is None:
        return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")
    extra = resume.extra.get(DOOR, {})
    counts = {name: extra[name] for name in COUNTS if name in extra}
    return [_written("model_states.pt", {"module": {}, **counts, **from_json(extra.get("client_state", {}))})]


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """The one of the first rank. Raises FileNotFoundError where there is none."""
    if read(Path(checkpoint_dir)) is not None:
        return get_model_state_files(checkpoint_dir)[0]
    name = f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt"
    if not (file := Path(checkpoint_dir, name)).is_file():
        raise FileNotFoundError(f"{file}: it is not there; name a checkpoint's folder, such as global_step1")
    return str(file)


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """The files of a folder that fit, in the order of the numbers in their names. Raises FileNotFoundError
    where there are none."""
    files = sorted(map(str, Path(checkpoint_dir).glob(glob_pattern)), key=natural_keys)
    if not files:
        raise FileNotFoundError(
            f"{checkpoint_dir}: it has no files {glob_pattern}; name the folder of a checkpoint"
        )
    return files


def natural_keys(text: str) -> list[int | str]:
    """A key by which numbers in texts are in their order."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _written(name: str, value: dict[str, object]) -> str:
    _folders.append(tempfile.TemporaryDirectory(prefix="polyreme-states-"))
    file = Path(_folders[-1].name, name)
    torch.save(value, file)
    return str(file)
