"""Shards within a host, copies between hosts: which ranks share one, and how sums go over all of them.

Invariants: copies stay equal to the last bit; sums are taken in rank order, first within each copy, then over
the copies.

Communication: within a copy as over any axis; between copies one sum of each reduced shard."""

from __future__ import annotations

from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from polyreme.distributed import quantized
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.distributed.sums import sum_into
from polyreme.distributed.work import Work, following
from polyreme.errors import ConfigError, Problem

MOST_QUANTIZED = 7
"""Copies beyond which int8 numbers, which each rank gets from every other one, are no fewer bytes."""


class Hybrid(Axis):
    """The ranks that share one copy of what is sharded, such as those of a host, beside the `replicas` that
    hold the same shard of other copies (HSDP; MiCS, arXiv:2205.00119; hpZ of ZeRO++, arXiv:2306.10209).

    Gathers and objects stay among the ranks of the copy. A reduce-scatter sums over all ranks, in the copy
    first, then its shards over the copies; a broadcast is of rank `source`, counted over the copies in order,
    to all."""

    def __init__(self, copy: Axis, replicas: Axis, quantizes: bool = False) -> None:
        """`quantizes`: sums between copies are of numbers that are sent in a byte each (`quantized`)."""
        super().__init__(copy.name, copy.size, copy.rank, copy.backend)
        self.counts, self.replicas, self._quantizes = copy.counts, replicas, quantizes

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False, of: str = "") -> Work:
        part = torch.empty_like(out) if accumulate else out
        works = [super().reduce_scatter(part, full, of=of)]  # in the copy, and then between copies

        def finish() -> None:
            works[0].wait()
            works.extend(_sum_over(self._replicas, part, self._quantizes))
            if accumulate:
                sum_into(out, [part], True)

        return following(works, finish, f"reduce-scatter{of} over {self.name}")

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        copy, rank = divmod(source, self.size)
        self._replicas.broadcast(tensor, copy)
        super().broadcast(tensor, rank)

    @property
    def _replicas(self) -> Axis:
        assert self.replicas is not None
        return self.replicas


def _sum_over(axis: Axis, tensor: Tensor, quantizes: bool) -> list[Work]:
    """Sum `tensor` over the ranks in place, in parts where that sends less; returns when it is complete."""
    size, nbytes = axis.size, tensor.nbytes
    if quantizes:
        works = [quantized.all_reduce(axis, tensor)]
    elif tensor.numel() % size or axis.backend.bytes_of_all_reduce(nbytes) <= 2 * (size - 1) * nbytes // size:
        works = [axis.all_reduce(tensor)]
    else:
        own = tensor.chunk(size)[axis.rank]
        works = [axis.reduce_scatter(own, tensor)]
        works[0].settle()  # others have read what the gather writes to
        works.append(axis.all_gather(tensor, own))
    works[-1].wait()
    return works


def sharing(mesh: Mesh, over: Literal["all", "host"] | int, quantizes: bool = False) -> Axis:
    """The axis over which data-parallel ranks shard what they share: all of them, or neighbours, those of
    each host or so many, with a copy in each such group. `quantizes`: see `Hybrid`. All ranks must call.

    Raises ConfigError where hosts do not have as many neighbours each, a rank would be alone, and for more
    copies than quantised sums are good for."""
    axis = mesh.loss
    size = _on_each_host(mesh) if over == "host" else axis.size if over == "all" else over
    if size == axis.size:
        return mesh.share(axis)
    if quantizes and axis.size // size > MOST_QUANTIZED:
        reason = f"between {axis.size // size} copies it would send more bytes, not fewer"
        fix = "write false, or a larger zero.shard_over"
        raise ConfigError([Problem("zero.quantized_gradients", True, reason, fix)])
    return mesh.share(Hybrid(*mesh.split("loss", size, ("dp_shard", "dp_replicate")), quantizes))


def _on_each_host(mesh: Mesh) -> int:
    """How many neighbours of each data-parallel line are on one host."""
    runs = [
        [(host, len([*ranks])) for host, ranks in groupby(mesh.host_of[rank] for rank in line)]
        for line in mesh.lines("loss")
    ]
    sizes = {size for line in runs for _, size in line}
    once = all(len(line) == len({host for host, _ in line}) for line in runs)
    if len(sizes) == 1 and once and (sizes != {1} or mesh.loss.size == 1):
        return sizes.pop()
    found = ", ".join(f"{size} on {host}" for host, size in runs[0])
    reason = f"of {mesh.loss.size} data-parallel ranks, in order, {found}, and each host must have as many"
    fix = 'start as many ranks on each host, at least 2, one host after the other, or write "all"'
    raise ConfigError([Problem("zero.shard_over", "host", reason, fix)])
