"""The device memory that a bucket takes: always, while it is gathered, and borrowed from the pool. No
communication."""

from __future__ import annotations

import torch

from polyreme.layout.bucket_layout import ALIGN
from polyreme.zero.bucket import Bucket
from polyreme.zero.buffer_pool import BufferCounts
from polyreme.zero.gradient_sums import StoredSum


def gathered_bytes(bucket: Bucket) -> int:
    """Return the bytes of the full parameters where they are gathered for each use, else 0."""
    return bucket.layout.size * bucket.formats.compute.itemsize if bucket.sharded else 0


def borrowed(bucket: Bucket) -> tuple[BufferCounts, BufferCounts, BufferCounts]:
    """Return the buffers that the bucket borrows from the pool: for unreduced gradients, for reduced ones,
    and for the shard that it sends to the other ranks."""
    sums, region = bucket.gradients.sums, bucket.region.stop - bucket.region.start
    local = [(bucket.layout.size, sums.local)] if bucket.trainable and sums.comes else []
    room = [(region, sums.reduce)] if sums.leaves and not sums.in_place else []
    here = (
        [(bucket.layout.shard_size, bucket.formats.compute)]
        if bucket.is_offloaded and bucket.axis.size > 1
        else []
    )
    return BufferCounts(local), BufferCounts(room), BufferCounts(here)


def resident_bytes(bucket: Bucket) -> tuple[int, int, int]:
    """Return the bytes that the bucket always takes: parameters, gradients, and the master where it is a
    copy."""
    itemsize, region = bucket.formats.compute.itemsize, bucket.region.stop - bucket.region.start
    parameters = (
        (bucket.layout.shard_size if not bucket.is_offloaded else 0) if bucket.sharded else bucket.layout.size
    )
    gradients, sums = bucket.gradients.unreduced * bucket.trainable, bucket.gradients.sums
    if bucket.trainable and not (sums.leaves or sums.in_place):
        gradients += region * sums.reduce.itemsize
    if isinstance(sums, StoredSum):  # plus squares by row
        gradients += bucket.layout.shard_size // ALIGN * torch.float64.itemsize
    master = bucket.master is not None and (
        bucket.is_offloaded or bucket.formats.master != bucket.formats.compute
    )
    return parameters * itemsize, gradients, region * bucket.formats.master.itemsize * master


def live_bytes(bucket: Bucket) -> dict[str, int]:
    """Return the bytes that this rank holds now, by category: parameters, gradients, states (the master where
    it is a copy)."""
    storages = {
        "parameters": [each for each in (bucket.full, bucket.device_shard) if each is not None],
        "gradients": bucket.gradients.live,
        "states": [bucket.master] if bucket.master is not None else [],
    }
    seen: set[int] = set()
    found = {}
    for category, tensors in storages.items():
        found[category] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[category] += storage.nbytes()
    return found
