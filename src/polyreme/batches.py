"""How a rank's share of a global batch becomes the micro-batches of a step. No communication.

Invariant: a step has the same number of micro-batches on every rank, whatever the shares are. So ranks with unlike shares, as of the last
batch of an epoch, call the model equally often and none waits for another. Those that are missing are filled up by some that count for
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.config import Config
from polyreme.errors import BatchError


@dataclass(frozen=True)
class MicroBatch:
    """What one forward gets, and how many samples it counts for; 0 for one that only fills up: its loss and gradients are zero."""

    batch: Any
    samples: int


def micro_batches(batch: Any, config: Config, first: bool) -> list[MicroBatch]:
    """The micro-batches of a step: a list of them as they are, anything else cut along its samples into parts that differ by one at most.

    Raises BatchError for more than batch.size / dp samples, or more than `config.accumulation` micro-batches; in the `first` step of a run,
    where it is a mistake and no end of an epoch, for fewer, too.
    """
    count, expected = config.accumulation, config.batch.size // int(config.mesh.dp)
    if is_list(batch):
        if len(batch) > count or (first and len(batch) < count):
            raise BatchError(
                f"train_step got a list of {len(batch)} micro-batches, but batch.size = {config.batch.size} over {config.mesh.dp} "
                f"ranks with batch.micro = {config.batch.micro} makes {count}: give {count}, or change batch.size or batch.micro"
            )
        return filled(parts_of(batch, config), count)
    if (size := leading_size(batch)) > expected or (first and size < expected):
        raise BatchError(
            f"this rank's share of the batch has {size} samples, but batch.size = {config.batch.size} over {config.mesh.dp} "
            f"data-parallel ranks makes {expected}: change batch.size, or give each rank {expected}"
            + (" (only later steps may have fewer, as the last of an epoch)" if size < expected else "")
        )
    return filled([part for each in split(batch, min(size, count) or 1) for part in parts_of(each, config)], count)


def is_list(batch: Any) -> bool:
    """Whether `batch` is a list of micro-batches: a list without a tensor among its elements. One with a tensor is a batch itself."""
    return isinstance(batch, list) and bool(batch) and not any(isinstance(part, Tensor) for part in batch)


def parts_of(batch: Any, config: Config) -> list[MicroBatch]:
    """A list's micro-batches, or the one that `batch` is."""
    found = []
    for part in batch if is_list(batch) else [batch]:
        samples = samples_of(part, config)
        found.append(MicroBatch(part if samples else pytree.tree_map_only(Tensor, _blank, part), samples))
    return found


def samples_of(part: Any, config: Config) -> int:
    """The samples of a micro-batch; batch.micro where that cannot be seen."""
    sizes = leading_sizes(part)
    return sizes.pop() if len(sizes) == 1 else int(config.batch.micro)


def filled(parts: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """`parts`, and as many that count for nothing as make `count`."""
    return [*parts, *[MicroBatch(parts[0].batch, 0)] * (count - len(parts))]


def leading_sizes(batch: Any) -> set[int]:
    """First dimensions of a batch's tensors (but scalars)."""
    return {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}


def leading_size(batch: Any) -> int:
    """The number of samples of a batch: the first dimension that all its tensors (but scalars) share.

    Raises BatchError where there is none, or where tensors differ."""
    sizes = leading_sizes(batch)
    if len(sizes) != 1:
        what = f"tensors with first dimensions {sorted(sizes)}" if sizes else "no tensor"
        raise BatchError(
            f"a batch needs tensors that share their first dimension, the samples; this one has {what}. Give train_step a list of "
            "micro-batches, [batch, ...], which are not cut"
        )
    return sizes.pop()


def digest(batch: Any) -> str:
    """The same for batches that are equal to the last bit."""
    found = blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {list(leaf.shape)} ".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def split(batch: Any, parts: int) -> list[Any]:
    """`batch` cut along its samples into `parts` micro-batches that differ by one sample at most; what is not a tensor goes into each."""
    if parts == 1:
        return [batch]
    leaves, spec = pytree.tree_flatten(batch)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([pieces[i] for pieces in cut], spec) for i in range(parts)]


def _blank(tensor: Tensor) -> Tensor:
    """One sample of zeros in place of none."""
    return tensor.new_zeros(1, *tensor.shape[1:]) if tensor.dim() else tensor
