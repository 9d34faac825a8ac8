"""The simulated backend: one rank of a group that does not exist, for plans, and for tests of one rank at any
world size.

Invariant: every other rank is taken to give what this one gives, so that outputs have the shapes, dtypes and
numbers of a run whose ranks are alike. Tensors without numbers (meta and fake ones) stay as they are; the
memory that an exchange takes for a while is taken for them, too.
Communication: none; an `Axis` counts what there would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyreme.distributed.sums import room, sum_into
from polyreme.distributed.work import DONE, Work


class Simulated:
    """A `Backend` of any number of ranks, of which this process stands for one."""

    kind, deterministic, device = "simulated", True, torch.device("cpu")

    def __init__(self, size: int, rank: int, computes_on: str = "cpu") -> None:
        """computes_on: the type of the device of the run."""
        self._size, self._rank, self._on_cpu = size, rank, computes_on == "cpu"
        self.waited: Callable[[], None] | None = None
        """A callback for the first wait for the operation that comes next."""

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        if not full.is_meta:
            for target in full.chunk(self._size):
                target.copy_(shard)
        return self._begun()

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        if full.is_meta:
            return self._begun(self._room_of_sum(out, full, accumulate))
        shard = full.chunk(self._size)[self._rank]
        sum_into(out, [shard.to(out.dtype) * self._size], accumulate)
        return self._begun()

    def _room_of_sum(self, out: Tensor, full: Tensor, accumulate: bool) -> Callable[[], object] | None:
        """Return what takes the memory that the sum takes: when it is waited for on a CPU, which sums itself
        (`gloo_direct`); from its begin on where a process group does (`process_group`)."""
        if self._on_cpu:
            alike = full.dtype == out.dtype
            return lambda: room(out, self._size, alike, accumulate, on_cpu=True)
        held = [] if full.dtype == out.dtype else [full.to(out.dtype)]
        if held or accumulate:
            held.append(torch.empty_like(out))

        def end() -> None:
            if accumulate:
                room(out, 1, True, accumulate, on_cpu=False)
            held.clear()

        return end if held else None

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        """Fill each received chunk with the chunk that this rank gives to itself, and with zeros beyond that
        chunk's size."""
        chunk = sent[self._rank]
        for target in received if not chunk.is_meta else ():
            known = min(target.numel(), chunk.numel())
            target[:known].copy_(chunk[:known])
            target[known:].zero_()
        return self._begun()

    def all_reduce(self, tensor: Tensor) -> Work:
        if tensor.is_meta:
            return self._begun(self._room_of_sum(tensor, tensor, False))
        tensor.mul_(self._size)
        return self._begun()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._begun()

    def send(self, tensor: Tensor, to: int) -> Work:
        return self._begun()

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with zeros: a rank that sends does other things than this one."""
        if not tensor.is_meta:
            tensor.zero_()
        return self._begun()

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        return [data] * self._size

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes if self._on_cpu else 2 * (self._size - 1) * nbytes // self._size

    def abort(self, why: str) -> None:
        """Do nothing, as nothing is ever under way."""

    def close(self) -> None:
        """Do nothing, as nothing is held."""

    def _begun(self, end: Callable[[], object] | None = None) -> Work:
        """Return the work of an operation, whose end is `end`."""
        waited, self.waited = self.waited, None
        ends = [each for each in (waited, end) if each is not None]

        def finish() -> None:
            for each in ends:
                each()

        return Work((), finish) if ends else DONE
