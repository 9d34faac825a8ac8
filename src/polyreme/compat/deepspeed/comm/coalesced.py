"""What scripts find in DeepSpeed's `comm.torch` and `runtime.comm.coalesced_collectives`: the number of ranks
that is known before they meet, and a reduce-scatter of several tensors at once.

Communication: one reduce-scatter of all tensors, on the group that is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyreme.compat.deepspeed import comm
from polyreme.compat.deepspeed.lazy import lazily
from polyreme.distributed.environment import WORLD_SIZE

__getattr__ = lazily(__name__)


def known_world_size(world_size: int | None) -> int | None:
    """Return the number of ranks that is given, or else the launcher's; None where neither says it."""
    told = os.environ.get(WORLD_SIZE, "")
    given = world_size or -1
    return given if given > 0 else int(told) if told.isdecimal() and int(told) > 0 else None


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's part of the mean over the ranks of each tensor, flat. Parts are of one length, but
    for the last ones, which may be shorter or empty."""
    size, rank = comm.get_world_size(group), comm.get_rank(group)
    lengths = [-(-tensor.numel() // size) for tensor in tensors]  # with padding
    padded = [
        functional.pad(tensor.reshape(-1), (0, size * length - tensor.numel())).view(size, length)
        for tensor, length in zip(tensors, lengths, strict=True)
    ]
    whole = torch.cat(padded, dim=1) / size
    part = whole.new_empty(whole.shape[1])
    comm.reduce_scatter_tensor(part, whole.view(-1), group=group)
    ends = [
        min(length, max(0, each.numel() - rank * length))
        for each, length in zip(tensors, lengths, strict=True)
    ]
    return [found[:end] for found, end in zip(part.split(lengths), ends, strict=True)]
