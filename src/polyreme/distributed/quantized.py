"""Numbers sent in a byte each: int8 in blocks of BLOCK with a float32 scale (ZeRO++, arXiv:2306.10209).

Invariants: a number comes back with an error of at most 1/254 of the largest of its block, or of 2**-127;
every rank, the sender too, gets the same bits; what is not finite comes back not finite. 1 + 4 / BLOCK bytes
a number.

Communication: one all-gather of the axis for each operation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.distributed.sums import CHUNK
from polyreme.distributed.work import Work, following
from polyreme.layout.intervals import ceil_div

BLOCK = 256
"""Numbers that share a scale."""
LEVELS = 127
"""Steps from zero to the largest number of a block."""
SCALE = torch.float32
LEAST = torch.finfo(SCALE).tiny
"""The smallest scale. Smaller ones have too few bits, and numbers would exceed LEVELS steps."""


def packed_size(numbers: int) -> int:
    """Return the bytes in which `numbers` many numbers, a multiple of 4, are sent."""
    return numbers + ceil_div(numbers, BLOCK) * SCALE.itemsize


def pack(numbers: Tensor, into: Tensor) -> Tensor:
    """Write flat floating-point `numbers` (a multiple of 4) to `into` (uint8, `packed_size` bytes): first
    int8 numbers, then the scales. Returns `into`."""
    size = numbers.numel()
    levels, scales = into[:size].view(torch.int8), into[size:].view(SCALE)
    for start in range(0, size, CHUNK):
        chunk = numbers[start : start + CHUNK].to(SCALE)
        rows = F.pad(chunk, (0, -chunk.numel() % BLOCK)).view(-1, BLOCK)
        scale = (rows.abs().amax(1) / LEVELS).clamp_min_(LEAST)
        steps = (rows / scale[:, None]).round_().to(torch.int8)
        levels[start : start + CHUNK] = steps.view(-1)[: chunk.numel()]
        scales[start // BLOCK :][: len(scale)] = scale
    return into


def unpack(packed: Tensor, out: Tensor, add: bool = False) -> None:
    """Write numbers that `pack` packed to `out` (flat, of any floating-point dtype), or add them to it."""
    size = out.numel()
    levels, scales = packed[:size].view(torch.int8), packed[size:].view(SCALE)
    for start in range(0, size, CHUNK):
        chunk = levels[start : start + CHUNK]
        rows = F.pad(chunk, (0, -chunk.numel() % BLOCK)).view(-1, BLOCK)
        numbers = (rows * scales[start // BLOCK :][: len(rows), None]).view(-1)[: chunk.numel()]
        place = out[start : start + CHUNK]
        place.add_(numbers.to(place.dtype)) if add else place.copy_(numbers)


def all_gather(axis: Axis, full: Tensor, shard: Tensor, of: str = "") -> Work:
    """Fill `full` with every rank's `shard`, sent in a byte a number. `shard` may be overwritten once this
    returns."""
    everyone, gathered = _gather(axis, shard, of)

    def finish() -> None:
        gathered.wait()
        for packed, place in zip(everyone.chunk(axis.size), full.chunk(axis.size), strict=True):
            unpack(packed, place)

    return following([gathered], finish, f"all-gather{of} over {axis.name}")


def all_reduce(axis: Axis, tensor: Tensor) -> Work:
    """Sum `tensor` (flat) over the ranks in place, in rank order. Each rank's numbers are sent in a byte
    each."""
    everyone, gathered = _gather(axis, tensor, "")

    def finish() -> None:
        gathered.wait()
        for rank, packed in enumerate(everyone.chunk(axis.size)):
            unpack(packed, tensor, add=rank > 0)

    return following([gathered], finish, f"all-reduce over {axis.name}")


def _gather(axis: Axis, numbers: Tensor, of: str) -> tuple[Tensor, Work]:
    """Begin to gather every rank's packed `numbers`."""
    size = packed_size(numbers.numel())
    mine = pack(numbers, axis.empty(size, torch.uint8, numbers.device))
    everyone = torch.empty(axis.size * size, dtype=torch.uint8, device=numbers.device)
    return everyone, axis.all_gather(everyone, mine, of)
