"""The protocol of what moves an `Axis`' tensors: the collectives of one group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from polyreme.distributed.work import Work


class Backend(Protocol):
    """The collectives of a group of at least two ranks. Tensors are flat and contiguous; only the chunks of
    an all-to-all may be empty.

    Every rank begins the same operations in the same order. An operation raises TransportError, when it
    begins or when it is waited for, where a rank has ended or cannot be reached; its output is then
    invalid."""

    deterministic: bool
    """Whether sums are taken in rank order, each element by itself, so that its place in a buffer does not
    change the result."""
    device: torch.device
    """The device of the backend's own tensors, such as those that carry objects."""

    @property
    def kind(self) -> str:
        """The backend's name, for messages and tests."""

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        """Fill `full` with every rank's `shard`, in rank order. `of` names it in errors."""

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        """Sum `full` over the ranks. This rank's shard goes to `out`, in `out`'s dtype; with `accumulate` it
        is added."""

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        """Give sent[r] to every rank r, and fill received[r] with what it gives. Each of both is consecutive
        chunks of one tensor, of any sizes. `of` names the operation in errors."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` over the ranks in place. The result has the same bits on every rank."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy `tensor`, of bytes, from rank `source` to all ranks."""

    def send(self, tensor: Tensor, to: int) -> Work:
        """Send `tensor` to one rank, whose receives match this rank's sends in order."""

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with what rank `source` sends."""

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        """Return every rank's `data` in rank order; all have the same length."""

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat, uninitialised tensor, which the backend moves without a copy where it can."""

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        """Return the bytes that this rank sends to all-reduce a tensor of `nbytes` bytes."""

    def abort(self, why: str) -> None:
        """Break off every operation that is under way or waits in this process, in whichever thread, also
        those of other backends of the same group. Each raises TransportError, which names it, within a
        second; so does every later one. Ranks that wait for this one are told the reason `why`, at once where
        they read its memory or are connected to it."""

    def close(self) -> None:
        """Release shared memory and connections; the group belongs to its world. No operation may begin
        afterwards."""
