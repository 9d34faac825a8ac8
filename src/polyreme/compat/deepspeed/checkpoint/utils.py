"""DeepSpeed's functions for scripts that save state dicts by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.compat.deepspeed.checkpoint.constants import MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX


def get_model_ckpt_name_for_rank(base_folder: str | Path, mp_rank_str: str) -> str:
    """Return where DeepSpeed keeps the model's states of a tensor-parallel rank."""
    return str(Path(base_folder) / f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item`, nested in lists, tuples and dictionaries, with copies of its tensors on `device`:
    torch.save writes the whole storage of a view."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)
