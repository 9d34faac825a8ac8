"""Micro-batches: cuts a rank's share of a global batch into those of a step.

Invariant: a step has the same number of micro-batches on every rank, whatever the shares are. So ranks with
unlike shares, as of the last batch of an epoch, call the model equally often and none waits for another.
Those that are missing are filled up by some that count for nothing.
Communication: the first batch's digest, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.distributed.mesh import Mesh
from polyreme.errors import BatchError, warn


@dataclass(frozen=True)
class MicroBatch:
    """What one forward gets, and how many samples and tokens it counts for; none for one that fills up: its
    loss and gradients are zero. weight: what its mean loss is the mean of, where that is known."""

    batch: Any
    samples: int
    tokens: int = 0
    weight: float | None = None


@dataclass(frozen=True)
class Batching:
    """How a global batch is cut: `size` samples over `ranks` data-parallel ranks, and the share of each into
    micro-batches of `micro`. mean: what the loss is a mean over, as `batch.mean` says. fits: how many samples
    of a micro-batch were found to fit."""

    size: int
    ranks: int
    micro: int
    mean: str
    fits: int | None = None

    @property
    def share(self) -> int:
        """Samples of a global batch on one rank."""
        return self.size // self.ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step on one rank."""
        return self.share // self.micro


class Batches:
    """How the batches of an engine are cut `now`: another way once it is found how many samples fit."""

    def __init__(self, now: Batching, refit: Callable[[int | None], Batching]) -> None:
        """refit: cuts them anew, with at most so many samples in a micro-batch."""
        self.now, self._refit = now, refit

    def fit(self, micro: int | None) -> None:
        """Have micro-batches of at most so many samples; None: of as many as now. Raises ConfigError where a
        step cannot have several."""
        self.now = self._refit(micro)


def micro_batches(batch: Any, batching: Batching, first: bool) -> list[MicroBatch]:
    """The micro-batches of a step: a list of them as they are, anything else cut along its samples into parts
    that differ by one at most.

    Raises BatchError for more than batch.size / dp samples, or more than `batching.accumulation`
    micro-batches; in the `first` step of a run, where it is a mistake and no end of an epoch, for fewer,
    too."""
    batch = plain_mappings(batch)
    count, expected = batching.accumulation, batching.share
    if is_list(batch):
        if len(batch) > count or (first and len(batch) < count):
            raise BatchError(
                f"train_step got a list of {len(batch)} micro-batches, but "
                f"batch.size = {batching.size} over {batching.ranks} "
                f"ranks with batch.micro = {batching.micro} makes "
                f"{count}: give {count}, or change batch.size or batch.micro"
            )
        return filled(micro_batches_of(batch, batching), count)
    if (size := leading_size(batch)) > expected or (first and size < expected):
        raise BatchError(
            f"this rank's share of the batch has {size} samples, but "
            f"batch.size = {batching.size} over {batching.ranks} "
            f"data-parallel ranks makes {expected}: change batch.size, or give each rank {expected}"
            + (" (only later steps may have fewer, as the last of an epoch)" if size < expected else "")
        )
    return filled(
        [one for each in split(batch, min(size, count) or 1) for one in micro_batches_of(each, batching)],
        count,
    )


def is_list(batch: Any) -> bool:
    """Whether `batch` is a list of micro-batches: a list without a tensor among its elements. One with a
    tensor is a batch itself."""
    return (
        isinstance(batch, list)
        and bool(batch)
        and not any(isinstance(micro_batch, Tensor) for micro_batch in batch)
    )


def micro_batches_of(batch: Any, batching: Batching) -> list[MicroBatch]:
    """A list's micro-batches, or the one that `batch` is. Raises BatchError for a list of none."""
    batch, found = plain_mappings(batch), []
    if isinstance(batch, list) and not batch:
        raise BatchError(
            "the batch is an empty list: a rank without samples gives tensors of none, such as batch[:0]"
        )
    for micro_batch in batch if is_list(batch) else [batch]:
        samples = samples_of(micro_batch, batching)
        found.append(
            MicroBatch(micro_batch if samples else pytree.tree_map_only(Tensor, _blank, micro_batch), samples)
        )
    return found


def samples_of(micro_batch: Any, batching: Batching) -> int:
    """The samples of a micro-batch; batch.micro where that cannot be seen."""
    sizes = leading_sizes(micro_batch)
    return sizes.pop() if len(sizes) == 1 else batching.micro


def filled(micro_batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """`micro_batches`, and as many that count for nothing as make `count`."""
    return [*micro_batches, *[MicroBatch(micro_batches[0].batch, 0)] * (count - len(micro_batches))]


def plain_mappings(batch: Any) -> Any:
    """`batch` with a dict for every mapping that torch's trees do not know, such as the UserDict that a
    tokenizer returns."""
    if all(_only_tensors(part) is not None for part in (batch if isinstance(batch, list) else [batch])):
        return batch
    return pytree.tree_map_only(
        Mapping, lambda each: {key: plain_mappings(value) for key, value in each.items()}, batch
    )


def _only_tensors(batch: Any) -> list[Tensor] | None:
    """The tensors of a batch that is one, or a tuple or dict of them, as nearly all are, and has nothing
    else."""
    parts = [*batch.values()] if type(batch) is dict else [*batch] if type(batch) is tuple else [batch]
    return parts if all(isinstance(part, Tensor) and not part.is_nested for part in parts) else None


def leading_sizes(batch: Any) -> set[int]:
    """First dimensions of a batch's tensors and arrays (but scalars), and lengths of lists that have an
    element for each sample. Raises BatchError for a nested tensor that has no shape."""
    if (tensors := _only_tensors(batch)) is not None:
        return {len(each) for each in tensors if each.dim()}
    return _lengths(pytree.tree_leaves(batch, _by_sample(batch))) | _images_alone(batch)


def _lengths(leaves: Sequence[Any]) -> set[int]:
    if any(isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout == torch.strided for leaf in leaves):
        raise BatchError(
            "the batch has a nested tensor of strided layout, "
            "which has no shape: make it with layout=torch.jagged"
        )
    return {len(leaf) for leaf in leaves if _has_rows(leaf) or _has_only(leaf, Mapping)}


def _has_only(node: Any, kind: type) -> bool:
    return isinstance(node, list) and bool(node) and all(isinstance(each, kind) for each in node)


def _by_sample(batch: Any) -> Callable[[Any], bool]:
    """Which lists have an element for each sample: those of mappings (targets of detection); and, of those of
    tensors that are as long as all else of the batch, images and whatever has other first dimensions."""
    sizes = _lengths(
        pytree.tree_leaves(batch, lambda node: _has_only(node, Mapping) or _has_only(node, Tensor))
    )

    def is_one(node: Any) -> bool:
        if not _has_only(node, Tensor):
            return _has_only(node, Mapping)
        return sizes == {len(node)} and (
            _are_images(node) or all(each.dim() and len(each) not in sizes for each in node)
        )

    return is_one


def _are_images(tensors: Sequence[Tensor]) -> bool:
    """Whether they are (channels, height, width) of several sizes."""
    return all(each.dim() == 3 for each in tensors) and len({each.shape[1:] for each in tensors}) > 1


def _images_alone(batch: Any) -> set[int]:
    """How many images there are, where a batch is nothing but a list of some of several sizes, whose channels
    would pass for samples."""
    found = [*batch] if isinstance(batch, tuple) else [*batch.values()] if isinstance(batch, Mapping) else []
    return (
        {len(found[0])}
        if len(found) == 1 and _has_only(found[0], Tensor) and _are_images(found[0])
        else set()
    )


def leading_size(batch: Any) -> int:
    """The number of samples of a batch: the first dimension that all its tensors (but scalars) share.

    Raises BatchError where there is none, or where tensors differ."""
    sizes = leading_sizes(batch)
    if len(sizes) != 1:
        what = f"tensors with first dimensions {sorted(sizes)}" if sizes else "no tensor"
        raise BatchError(
            "a batch needs tensors that share their first dimension, "
            f"the samples; this one has {what}. Give train_step a list of "
            "micro-batches, [batch, ...], which are not cut"
        )
    return sizes.pop()


def digest(batch: Any) -> str:
    """The same for batches that are equal to the last bit."""
    found = blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {list(leaf.shape)} ".encode())
            if leaf.layout != torch.strided:
                leaf = (leaf.coalesce() if leaf.layout == torch.sparse_coo else leaf).values()
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class BatchComparison:
    """Compares the first batch between ranks: it is the same within a tp or pp line, and another one on each
    data-parallel rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._compared = self._warned = False
        self._digest: str | None = None

    def compare(self, batch: Any) -> None:
        """Refuse, the first time, a batch that differs between ranks that compute it together."""
        if self._compared:
            return
        for axis in (self._mesh.tp, self._mesh.pp):
            if axis.size > 1 and len({*axis.gather_objects(digest(batch))}) > 1:
                raise BatchError(
                    f"ranks of one {axis.name} line have different batches, "
                    "but compute one together: give each rank the share of its "
                    "place in data parallelism (engine.mesh.dp.rank of "
                    "engine.mesh.dp.size, not of the world), as engine.loader does"
                )
        if self._mesh.data.size > 1:
            self._digest = digest(batch)
        self._compared = True

    def warn(self) -> None:
        """Warn, the first time, where all data-parallel ranks have the same batch. All ranks must call."""
        digests: list[Any] = [] if self._warned else self._mesh.data.gather_objects(self._digest)
        self._warned = True
        if len(digests) > 1 and digests[0] is not None and len({*digests}) == 1:
            warn(
                f"all {len(digests)} data-parallel ranks train on the same batch, "
                f"so that {len(digests) - 1} of them add nothing: give each "
                "its own share, with engine.loader(dataset), or a DataLoader "
                "with sampler=DistributedSampler(dataset, dp.size, dp.rank), dp "
                "being engine.mesh.dp"
            )


def split(batch: Any, count: int) -> list[Any]:
    """`batch` cut along its samples into `count` micro-batches that differ by one sample at most. Cut are
    tensors, arrays and lists as long as these, as of a sample's name; all else goes into each.

    Raises BatchError for a tensor that cannot be cut."""
    if count == 1:
        return [batch]
    samples, by_sample = leading_size(batch), _by_sample(batch)
    leaves, spec = pytree.tree_flatten(
        batch,
        lambda node: (
            by_sample(node) or (isinstance(node, list) and len(node) == samples and not leading_sizes(node))
        ),
    )
    return [
        pytree.tree_unflatten([_rows(leaf, rows) for leaf in leaves], spec)
        for rows in _bounds(samples, count)
    ]


def _bounds(samples: int, count: int) -> list[slice]:
    """Rows of each part, cut as `tensor_split` cuts: the first parts are the longer ones."""
    least, more = divmod(samples, count)
    ends = [least * i + min(i, more) for i in range(count + 1)]
    return [slice(*ends[i : i + 2]) for i in range(count)]


def _rows(leaf: Any, rows: slice) -> Any:
    if not (_has_rows(leaf) or isinstance(leaf, list)):
        return leaf
    if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
        raise BatchError(
            f"a tensor of layout {leaf.layout} cannot be cut into "
            "micro-batches: give train_step a list of them, [batch, ...]"
        )
    return leaf[rows]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0


def _blank(tensor: Tensor) -> Tensor:
    """One sample of zeros in place of none."""
    return tensor.new_zeros(1, *tensor.shape[1:]) if tensor.dim() else tensor
