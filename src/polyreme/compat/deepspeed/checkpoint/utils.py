"""Helpers of scripts that save state dicts by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item`, nested in lists, tuples and dictionaries, with copies of its tensors on `device`: torch.save
    writes the whole storage of a view."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)
