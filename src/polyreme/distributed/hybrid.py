"""Shards within a host, copies between hosts (HSDP): which ranks share a copy, and how sums go over all of
them.

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
"""Copies beyond which int8 sums, for which each rank receives from every other one, no longer save bytes."""


class Hybrid(Axis):
    """The ranks that share one copy of the shards, such as those of a host, together with the `replicas` that
    hold the same shard of other copies (HSDP; MiCS, arXiv:2205.00119; hpZ of ZeRO++, arXiv:2306.10209).

    Gathers and objects stay within the copy. A reduce-scatter sums over all ranks, in the copy first, then
    its shards over the copies. A broadcast goes from rank `source`, counted over the copies in order, to all
    ranks."""

    def __init__(self, copy: Axis, replicas: Axis, quantizes: bool = False) -> None:
        """`quantizes`: sums between copies send each number in a byte (`quantized`)."""
        super().__init__(copy.name, copy.size, copy.rank, copy.backend)
        self.counts, self.replicas, self._quantizes = copy.counts, replicas, quantizes

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False, of: str = "") -> Work:
        shard = torch.empty_like(out) if accumulate else out
        # first within the copy; `finish` adds those between copies
        works = [super().reduce_scatter(shard, full, of=of)]

        def finish() -> None:
            works[0].wait()
            works.extend(_sum_over(self._replicas, shard, self._quantizes))
            if accumulate:
                sum_into(out, [shard], True)

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
    """Sum `tensor` over the ranks in place, by a reduce-scatter and an all-gather where that sends less.
    Returns when the sum is complete."""
    size, nbytes = axis.size, tensor.nbytes
    if quantizes:
        works = [quantized.all_reduce(axis, tensor)]
    elif tensor.numel() % size or axis.backend.bytes_of_all_reduce(nbytes) <= 2 * (size - 1) * nbytes // size:
        works = [axis.all_reduce(tensor)]
    else:
        own = tensor.chunk(size)[axis.rank]
        works = [axis.reduce_scatter(own, tensor)]
        works[0].settle()  # the gather overwrites what other ranks read until now
        works.append(axis.all_gather(tensor, own))
    works[-1].wait()
    return works


def sharing(mesh: Mesh, over: Literal["all", "host"] | int, quantizes: bool = False) -> Axis:
    """Return the axis over which data-parallel ranks shard: all of them ("all"), those of each host ("host"),
    or so many neighbours, with one copy for each such group. `quantizes`: see `Hybrid`. All ranks must call.

    Raises ConfigError where hosts do not have equally many neighbours, a rank would be alone, or there are
    too many copies for quantised sums."""
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
    """Return how many neighbours of each data-parallel line are on one host. Raises ConfigError where that
    differs."""
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
