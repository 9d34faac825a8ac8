"""The simulated backend, a rank of a group that does not exist: for plans, and for tests of what one rank
does at any size.

Invariant: every other rank is taken to give what this one gives, so that outputs have the shapes, dtypes and
numbers of a run whose ranks are alike. Works on tensors without numbers (meta and fake ones), too.
Communication: none; an `Axis` counts what there would be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme.distributed.sums import sum_into
from polyreme.distributed.work import DONE, Work


class Simulated:
    """Any number of ranks, of which this process is any one."""

    kind, deterministic, device = "simulated", True, torch.device("cpu")

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        for target in full.chunk(self._size):
            target.copy_(shard)
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        part = full.chunk(self._size)[self._rank]
        sum_into(out, [part.to(out.dtype) * self._size], accumulate)
        return DONE

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        """What every other rank gives to one in this one's place; zeros where that is too little."""
        part = sent[self._rank]
        for target in received:
            known = min(target.numel(), part.numel())
            target[:known].copy_(part[:known])
            target[known:].zero_()
        return DONE

    def all_reduce(self, tensor: Tensor) -> Work:
        tensor.mul_(self._size)
        return DONE

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return DONE

    def send(self, tensor: Tensor, to: int) -> Work:
        return DONE

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with zeros: a peer that sends does other things than this rank."""
        tensor.zero_()
        return DONE

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        return [data] * self._size

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes

    def abort(self, why: str) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""
