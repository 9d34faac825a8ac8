"""Opens a checkpoint of any supported format. No communication."""

from __future__ import annotations

from pathlib import Path

from polyreme.checkpoint.files import reading
from polyreme.checkpoint.formats import dcp, deepspeed
from polyreme.checkpoint.formats.dcp import DCPCheckpoint
from polyreme.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.manifest import NAME as RESUME
from polyreme.checkpoint.sources import Source
from polyreme.errors import CheckpointError, named


def open_source(path: str | Path) -> Source:
    """Open the checkpoint in the folder `path`: one of ours, of DeepSpeed, of torch.distributed.checkpoint or
    of Hugging Face.

    Of several in one folder, as Hugging Face's trainer leaves them, the first in this order is opened:
    weights alone would lose the optimizer's states. Raises CheckpointError where there is none or it is
    damaged."""
    path = Path(path)
    with reading(path):
        if not path.is_dir():
            way = (
                ", but a file: give the folder of a checkpoint; or, before initialize, load the weights "
                "that torch.save wrote by model.load_state_dict(torch.load(path))"
            )
            raise CheckpointError(f"{path} is not a folder{way * path.exists()}")
        names = {entry.name for entry in path.iterdir()}
    if RESUME in names:
        return Directory(path)
    if deepspeed.find(path) is not None:
        return DeepSpeedCheckpoint(path)
    if dcp.METADATA in names:
        return DCPCheckpoint(path)
    if any(name.startswith(("model.safetensors", "pytorch_model")) for name in names):
        return Directory(path)
    if inside := sorted(name for name in names if (path / name / RESUME).is_file()):
        raise CheckpointError(
            f"{path} is no checkpoint, but has {named(inside)}: give the path of one. Of a folder of "
            "checkpoints the newest is found of those that are called step-N"
        )
    raise CheckpointError(
        f"{path} has no checkpoint that can be read. It would have a "
        f"{RESUME} (Polyreme), model.safetensors or its index (Hugging Face), "
        "*_model_states.pt or a file `latest` that names a folder of such "
        f"(DeepSpeed), or {dcp.METADATA} (torch.distributed.checkpoint); "
        f"it has {named(sorted(names), 10) or 'no files'}"
    )
