"""Sums of tensors in a fixed order, so that ranks and runs agree to the last bit. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements summed at a time: small enough that a chunk and its conversion stay in the cache."""


def put(target: Tensor, part: Tensor) -> None:
    """Copy `part` to its place, unless it is there."""
    if target.data_ptr() != part.data_ptr():
        target.copy_(part)


def sum_into(out: Tensor, parts: Sequence[Tensor], accumulate: bool) -> None:
    """out = (out +) parts[0] + parts[1] + ..., in that order, element by element, in `out`'s dtype. Parts may
    alias `out`."""
    if len(parts) == 1 and not accumulate:
        put(out, parts[0])
        return
    if len(parts) == 2 and not accumulate and all(part.dtype == out.dtype for part in parts):
        torch.add(parts[0], parts[1], out=out)
        return
    chunk = CHUNK if out.device.type == "cpu" else max(out.numel(), 1)
    size = min(chunk, out.numel())
    total, wide = torch.empty(2, size, dtype=out.dtype, device=out.device)
    for start in range(0, out.numel(), chunk):
        stop = min(start + chunk, out.numel())
        acc, operand = total[: stop - start], wide[: stop - start]
        acc.copy_(parts[0][start:stop])
        # converted first: a mixed-dtype add is several times slower than a copy and an add
        for part in parts[1:]:
            acc.add_(part[start:stop] if part.dtype == out.dtype else operand.copy_(part[start:stop]))
        if accumulate:
            out[start:stop].add_(acc)
        else:
            out[start:stop].copy_(acc)
