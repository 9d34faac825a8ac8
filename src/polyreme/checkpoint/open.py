"""Opens a checkpoint of any format that is read. No communication."""

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
    """The checkpoint in the folder `path`: one of ours, of DeepSpeed, of torch.distributed.checkpoint or of
    Hugging Face.

    Of several in one folder, as Hugging Face's trainer leaves them, it is the first of these, as weights
    alone would lose the optimizer's states. Raises CheckpointError where there is none, or for what is wrong
    with it."""
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
    raise CheckpointError(
        f"{path} has no checkpoint that can be read. It would have a "
        f"{RESUME} (Polyreme), model.safetensors or its index (Hugging Face), "
        "*_model_states.pt or a file `latest` that names a folder of such "
        f"(DeepSpeed), or {dcp.METADATA} (torch.distributed.checkpoint); "
        f"it has {named(sorted(names), 10) or 'no files'}"
    )
