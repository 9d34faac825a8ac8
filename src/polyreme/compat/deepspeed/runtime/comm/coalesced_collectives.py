"""Collectives over several tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyreme.compat.deepspeed import comm
from polyreme.compat.deepspeed.refusal import absent


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """This rank's part of the mean over the ranks of each tensor, flat: parts are equal but for the last
    ones, which may be shorter or empty. One reduce-scatter of all of them."""
    size, rank = comm.get_world_size(group), comm.get_rank(group)
    lengths = [-(-tensor.numel() // size) for tensor in tensors]  # with padding
    rows = [
        functional.pad(tensor.reshape(-1), (0, size * length - tensor.numel())).view(size, length)
        for tensor, length in zip(tensors, lengths, strict=True)
    ]
    whole = torch.cat(rows, dim=1) / size
    part = whole.new_empty(whole.shape[1])
    comm.reduce_scatter_tensor(part, whole.view(-1), group=group)
    return [
        found[: min(length, max(0, tensor.numel() - rank * length))]
        for tensor, length, found in zip(tensors, lengths, part.split(lengths), strict=True)
    ]


all_to_all_quant_reduce = absent(
    "deepspeed.runtime.comm.coalesced_collectives.all_to_all_quant_reduce",
    "sums over ranks are made of whole numbers",
    "use reduce_scatter_coalesced; zero_quantized_gradients in the config is refused, too",
)
