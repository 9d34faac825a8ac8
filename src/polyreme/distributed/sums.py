"""Sums of tensors in a fixed order, so that ranks and runs agree to the last bit. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements summed at a time: small enough that a chunk and its conversion stay in the cache."""


def put(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`, unless it already lies there."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def room(out: Tensor, count: int, alike: bool, accumulate: bool, on_cpu: bool) -> Tensor | None:
    """Return the memory in which so many tensors are summed into `out`: two rows; None where one operator
    sums
    them. alike: whether all have `out`'s dtype. On a CPU they are summed chunk by chunk."""
    if count == 2 and not accumulate and alike:
        return None
    size = min(CHUNK, out.numel()) if on_cpu else out.numel()
    return torch.empty(2, size, dtype=out.dtype, device=out.device)


def sum_into(out: Tensor, summands: Sequence[Tensor], accumulate: bool) -> None:
    """Compute out = (out +) summands[0] + summands[1] + ..., in that order, element by element, in `out`'s
    dtype. Summands may alias `out`."""
    if len(summands) == 1 and not accumulate:
        put(out, summands[0])
        return
    alike = all(each.dtype == out.dtype for each in summands)
    rows = room(out, len(summands), alike, accumulate, out.device.type in ("cpu", "meta"))
    if out.is_meta:  # there is nothing more to do without numbers
        return
    if rows is None:
        torch.add(summands[0], summands[1], out=out)
        return
    total, wide = rows
    chunk = max(len(total), 1)
    for start in range(0, out.numel(), chunk):
        stop = min(start + chunk, out.numel())
        acc, operand = total[: stop - start], wide[: stop - start]
        acc.copy_(summands[0][start:stop])
        # converted first: a mixed-dtype add is several times slower than a copy and an add
        for summand in summands[1:]:
            acc.add_(
                summand[start:stop] if summand.dtype == out.dtype else operand.copy_(summand[start:stop])
            )
        if accumulate:
            out[start:stop].add_(acc)
        else:
            out[start:stop].copy_(acc)
