"""A model of the memory that a step takes, from the sizes of its buckets and the order in which they are
used.

Invariant: no memory is inspected, so that the figures are a prediction. No communication."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_

import torch

from polyreme.files.direct_io import padded
from polyreme.offload.file import WRITING
from polyreme.placement.placement import Placement
from polyreme.zero.bucket import Bucket
from polyreme.zero.bucket_memory import borrowed, gathered_bytes, resident_bytes
from polyreme.zero.buffer_pool import BufferCounts
from polyreme.zero.reduce import IN_FLIGHT


def working_set(placement: Placement, prefetch: int) -> dict[str, int]:
    """Return the most bytes that a step takes, by category: everything that stays, the parameters of the root
    and of 1 + `prefetch` blocks (from files 1, and the shards of the others), the pool's buffers, and one
    gradient that autograd has just made.

    `exchange`: on CPU ranks, the memory of other ranks that they read or receive."""
    units, offload, buckets = (placement.root, *placement.units), placement.offload, placement.buckets
    stay = [bucket for unit in units if unit is placement.root or unit.pinned for bucket in unit.buckets]
    blocks = [unit.buckets for unit in placement.units if not unit.pinned]
    ahead = [list(chain(*blocks[max(i - prefetch, 0) : i + 1])) for i in range(len(blocks))]
    far = offload.parameters is not None and not offload.parameters.in_memory
    pooled = _pooled(placement, stay, blocks, None if far else ahead)
    parameters, gradients, masters = (sum(resident_bytes(bucket)[i] for bucket in buckets) for i in range(3))
    full = max((sum(map(gathered_bytes, each)) for each in (blocks if far else ahead)), default=0)
    single = max(
        (slot.size * b.formats.compute.itemsize for b in placement.trainable for slot in b.layout.slots),
        default=0,
    )
    # an update changes the first and writes the others
    written = [placement.trainable[i : i + 1 + WRITING] for i in range(len(placement.trainable))]
    fetched = [[*stay, *chain(*blocks[:1])], *ahead, *written]
    return {
        "parameters": parameters + sum(map(gathered_bytes, stay)) + full,
        "gradients": gradients + _bytes(pooled) + single,
        "states": masters,
        "tiers": offload.memory(_bytes(_most(map(_files, fetched)))),
        "exchange": _read(placement, pooled) if placement.device.type == "cpu" else 0,
    }


def _pooled(
    placement: Placement,
    stay: Sequence[Bucket],
    blocks: Sequence[Sequence[Bucket]],
    ahead: Sequence[Sequence[Bucket]] | None,
) -> BufferCounts:
    """Return the buffers of the pool that a step uses at once; on a CPU, where the pool keeps them, the most
    of each size at any moment.

    In backward a block fills its buffers while the last reductions of the block before are in flight, and the
    shards of the blocks `ahead` are on their way (None: of one bucket after the other). The buckets in `stay`
    are reduced after all blocks."""
    moments: list[BufferCounts] = []
    flying: deque[Bucket] = deque(maxlen=IN_FLIGHT)

    def note(filled: Sequence[Bucket], shards: BufferCounts) -> None:
        unreduced = _sum(borrowed(bucket)[0] for bucket in {*stay, *filled, *flying})
        moments.append(unreduced + _sum(borrowed(bucket)[1] for bucket in flying) + shards)

    for i in reversed(range(-1, len(blocks))):
        filled = stay if i < 0 else blocks[i]
        if ahead is None:
            note(filled, _most(borrowed(bucket)[2] for bucket in filled))
        else:
            note(filled, _sum(borrowed(bucket)[2] for bucket in (stay if i < 0 else ahead[i])))
        for bucket in (each for each in reversed(placement.trainable) if each in filled):
            flying.append(bucket)
            note(filled, BufferCounts())
    return _most(moments) if placement.device.type == "cpu" else max(moments, key=_bytes)


def _read(placement: Placement, pooled: BufferCounts) -> int:
    """Return the bytes of other ranks' memory that a CPU rank reads: its shard of each reduction, and whole
    shards of parameters."""
    ranks = max((bucket.axis.size for bucket in placement.buckets), default=1)
    shards = BufferCounts(
        {buffer: pooled[buffer] for bucket in placement.buckets for buffer in borrowed(bucket)[2]}
    )
    reduced = (
        BufferCounts(
            {buffer: pooled[buffer] for bucket in placement.buckets for buffer in borrowed(bucket)[0]}
        )
        - shards
    )
    unreduced = sum(bucket.gradients.unreduced for bucket in placement.trainable)
    size = _bytes(shards) + (_bytes(reduced) + unreduced) // ranks
    size += sum(_shard_bytes(bucket) for bucket in placement.buckets if not bucket.is_offloaded)
    return (ranks - 1) * size


def _files(buckets: Iterable[Bucket]) -> BufferCounts:
    """Return the buffers through which shards in files pass."""
    return BufferCounts((padded(_shard_bytes(each)), torch.uint8) for each in buckets if each.is_offloaded)


def _shard_bytes(bucket: Bucket) -> int:
    return bucket.layout.shard_size * bucket.formats.compute.itemsize


def _sum(several: Iterable[BufferCounts]) -> BufferCounts:
    return sum(several, BufferCounts())


def _most(several: Iterable[BufferCounts]) -> BufferCounts:
    """Return the largest count of each buffer size."""
    return reduce(or_, several, BufferCounts())


def _bytes(buffers: BufferCounts) -> int:
    return sum(count * elements * dtype.itemsize for (elements, dtype), count in buffers.items())
