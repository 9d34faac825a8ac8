"""What an `Axis` needs of whoever moves its tensors: the collectives of one group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from polyreme.distributed.work import Work


class Backend(Protocol):
    """The collectives of a group of at least two ranks. Tensors are flat and contiguous; none is empty, but
    for parts of an all-to-all.

    Every rank begins the same operations in the same order. An operation raises TransportError, when it
    begins or when it is waited for, where a rank has ended or cannot be reached; its output then counts as
    nothing."""

    deterministic: bool
    """Whether sums are taken in rank order, each number by itself, so that its place makes no difference."""
    device: torch.device
    """Where tensors of its own are made, such as those that carry objects."""

    @property
    def kind(self) -> str:
        """What it is, for messages and tests."""

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        """Fill `full` with every rank's `shard`, in rank order. `of` names it in errors."""

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        """Sum `full` over the ranks; this rank's part goes to `out`, in `out`'s dtype, or is added to it."""

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        """Give sent[r] to every rank r, and fill received[r] with what it gives; both are consecutive parts
        of one tensor each, of any sizes. `of` names it in errors."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` over the ranks in place, to the same bits on every rank."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy `tensor`, of bytes, from rank `source` to all."""

    def send(self, tensor: Tensor, to: int) -> Work:
        """Send `tensor` to one rank, in the order of its receives."""

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with what one rank sends."""

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        """Every rank's `data`, of one length, in rank order."""

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor, not initialised, which it moves without a copy where it can."""

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        """What this rank sends to all-reduce a tensor of `nbytes` bytes."""

    def abort(self, why: str) -> None:
        """Break off every operation that is under way or waits in this process, in whichever thread, and with
        them those of other backends of the same group: each raises TransportError, which says what it was,
        within a second. So does every later one. Other ranks that wait for this one hear that it `why`, at
        once where they read its memory or are connected to it."""

    def close(self) -> None:
        """Let go of memory that is shared, and of what is connected; the group is its world's. Nothing is
        begun any more."""
