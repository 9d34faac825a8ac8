"""Micro-batches: cuts a rank's share of a global batch into those of a step.

Invariant: a step has the same number of micro-batches on every rank, whatever the shares are. So ranks with
unequal shares, as of the last batch of an epoch, call the model equally often and none waits for another.
Missing micro-batches are replaced by some with zero samples.
Communication: digests of the first batch, and later of one in every so many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.config.schema import SentinelsSection
from polyreme.distributed.mesh import Mesh, SimulatedMesh
from polyreme.errors import BatchError, warn
from polyreme.sequence.context import Division

ROWS, SEVERAL = 16, 4
"""Samples of a rank's batch that are compared with others', and how many are no chance."""
NUMBERS = 1024
"""Numbers of a sample that its digest depends on, about."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward, and its samples and tokens. One with zero samples keeps ranks in step: its
    loss and gradients are zero. weight: the number that its mean loss is over, where known."""

    batch: Any
    samples: int
    tokens: int = 0
    weight: float | None = None


@dataclass(frozen=True)
class Batching:
    """The cut of a global batch: `size` samples over `ranks` data-parallel ranks, and the share of each into
    micro-batches of `micro` samples. mean: the value of batch.mean. fits: how many samples of a micro-batch
    were found to fit."""

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
    """The cut of an engine's batches, `now`; it changes once it is known how many samples fit."""

    def __init__(self, now: Batching, refit: Callable[[int | None], Batching]) -> None:
        """refit: returns the cut with at most so many samples in a micro-batch."""
        self.now, self._refit = now, refit
        self.division: Division | None = None
        """How the sequences of the step are divided over mesh.cp."""

    def fit(self, micro: int | None) -> None:
        """Cut micro-batches of at most so many samples (None: as many as now). Raises ConfigError where a
        step cannot have several micro-batches."""
        self.now = self._refit(micro)


def micro_batches(batch: Any, batching: Batching, first: bool) -> list[MicroBatch]:
    """Return the micro-batches of a step: a list as it is; anything else cut along its samples into
    ones that differ by one sample at most.

    Raises BatchError for more than batch.size / dp samples, or more than `batching.accumulation`
    micro-batches. In the `first` step of a run fewer are an error too, as it cannot be the end of an
    epoch."""
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
    """Return whether `batch` is a list of micro-batches: a list without a tensor among its elements. One with
    a tensor is a batch itself."""
    return (
        isinstance(batch, list)
        and bool(batch)
        and not any(isinstance(micro_batch, Tensor) for micro_batch in batch)
    )


def micro_batches_of(batch: Any, batching: Batching) -> list[MicroBatch]:
    """Return a list's micro-batches, or the single one that `batch` is. Raises BatchError for an empty
    list."""
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
    """Return the samples of a micro-batch; batch.micro where they cannot be counted."""
    sizes = leading_sizes(micro_batch)
    return sizes.pop() if len(sizes) == 1 else batching.micro


def filled(micro_batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Return `micro_batches`, padded to `count` by some with zero samples."""
    return [*micro_batches, *[MicroBatch(micro_batches[0].batch, 0)] * (count - len(micro_batches))]


def plain_mappings(batch: Any) -> Any:
    """Return `batch` with a dict for every mapping that torch's trees do not know, such as the UserDict that
    a tokenizer returns."""
    if all(_only_tensors(each) is not None for each in (batch if isinstance(batch, list) else [batch])):
        return batch
    return pytree.tree_map_only(
        Mapping, lambda each: {key: plain_mappings(value) for key, value in each.items()}, batch
    )


def _only_tensors(batch: Any) -> list[Tensor] | None:
    """Return the tensors of a batch that is a tensor, or a tuple or dict of tensors only, as nearly all are;
    else None."""
    values = [*batch.values()] if type(batch) is dict else [*batch] if type(batch) is tuple else [batch]
    return values if all(isinstance(each, Tensor) and not each.is_nested for each in values) else None


def leading_sizes(batch: Any) -> set[int]:
    """Return the first dimensions of a batch's tensors and arrays (but scalars), and the lengths of lists
    with an element for each sample. Raises BatchError for a nested tensor that has no shape."""
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
    """Return a function that tells lists with an element for each sample: lists of mappings (targets of
    detection); and lists of tensors, as long as everything else in the batch, that are images or have other
    first dimensions."""
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
    """Return whether tensors are (channels, height, width) of several sizes."""
    return all(each.dim() == 3 for each in tensors) and len({each.shape[1:] for each in tensors}) > 1


def _images_alone(batch: Any) -> set[int]:
    """Return the number of images, where a batch is only a list of images of several sizes, whose channels
    would pass for samples."""
    found = [*batch] if isinstance(batch, tuple) else [*batch.values()] if isinstance(batch, Mapping) else []
    return (
        {len(found[0])}
        if len(found) == 1 and _has_only(found[0], Tensor) and _are_images(found[0])
        else set()
    )


def leading_size(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension that all its tensors (but scalars) share.

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
    """Return a digest, equal for batches that are equal to the last bit."""
    found = blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {list(leaf.shape)} ".encode())
            if leaf.layout != torch.strided:
                leaf = (leaf.coalesce() if leaf.layout == torch.sparse_coo else leaf).values()
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def lowest_rows(batch: Any) -> list[int]:
    """Return the lowest digests of a batch's samples, `ROWS` at most: of batches that share samples, in
    whatever order, these are the same ones. Of a batch without rows, the digest of all of it."""
    found: set[int] = set()
    for each in batch if is_list(batch) else [batch]:
        sizes = leading_sizes(each)
        leaves = [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor) and _has_rows(leaf)]
        if len(sizes) != 1 or not leaves or any(leaf.layout != torch.strided for leaf in leaves):
            return [int(digest(batch), 16)]
        if of_rows := [_row_digests(leaf) for leaf in leaves if len(leaf) in sizes - {0}]:
            found |= {*torch.stack(of_rows).sum(0).tolist()}
    return sorted(found)[:ROWS]


def _row_digests(tensor: Tensor) -> Tensor:
    """Return a digest of each row, by `NUMBERS` of its numbers about, as int64."""
    rows = tensor.detach().reshape(len(tensor), -1)
    rows = rows[:, :: max(1, rows.shape[1] // NUMBERS)].contiguous()
    words = rows.view(WORDS.get(rows.element_size(), torch.int64)).long()
    words = words + 0x1E3779B97F4A7C15 * torch.arange(1, words.shape[1] + 1, device=words.device)
    for factor in (
        0x3F58476D1CE4E5B9,
        0x14D049BB133111EB,
    ):  # a sum of numbers that are not mixed is often equal
        words = (words ^ (words >> 30)) * factor
    return (words.sum(1) + words.shape[1]).cpu()


class BatchComparison:
    """Compares batches between ranks, the first one and then one of every so many: they must be the same
    within a tp, pp or cp line, and differ between data-parallel ranks."""

    def __init__(self, mesh: Mesh, sentinels: SentinelsSection) -> None:
        self._mesh = mesh
        self._every = sentinels.every if sentinels.enabled else 0
        self._compared = self._asked = -1  # the step before which that was last
        self._warned = isinstance(mesh, SimulatedMesh)  # whose other ranks give what this one gives
        self._rows: list[int] = []
        self._shared: set[tuple[int, int]] = set()

    def _is_due(self, last: int, step: int) -> bool:
        return last < 0 or (step != last and self._every > 0 and step % self._every == 0)

    def compare(self, batch: Any, step: int) -> None:
        """Refuse a batch that differs between ranks that compute it together, in a step that compares."""
        if not self._is_due(self._compared, step) or (step and not torch.is_grad_enabled()):
            return
        for axis in (self._mesh.tp, self._mesh.pp, self._mesh.cp):
            if axis.size > 1 and len({*axis.gather_objects(digest(batch))}) > 1:
                raise BatchError(
                    f"ranks of one {axis.name} line have different batches, "
                    "but compute one together: give each rank the share of its "
                    "place in data parallelism (engine.mesh.dp.rank of "
                    "engine.mesh.dp.size, not of the world), as engine.loader does"
                )
        if self._mesh.data.size > 1 and not self._warned:
            self._rows = lowest_rows(batch)
        self._compared = step

    def warn(self, step: int) -> None:
        """Warn once where data-parallel ranks have the same samples, in a step that compares. All ranks must
        call."""
        due, self._asked = self._is_due(self._asked, step), step
        if not due or self._warned or self._mesh.data.size == 1:
            return
        gathered: list[Any] = self._mesh.data.gather_objects([self._mesh.rank, self._rows])
        rows = {rank: {*theirs} for rank, theirs in gathered}
        first, *others = rows.values()
        self._rows = []
        if first and others and all(each == first for each in others):
            text = _SAME.format(len(rows), len(rows) - 1)
        elif shared := self._pairs(rows):
            text = _SHARED.format(*min(shared), step + 1)
        else:
            return
        self._warned = True
        warn(f"{text}: {_SHARES}")

    def _pairs(self, rows: Mapping[int, set[int]]) -> set[tuple[int, int]]:
        """Return the pairs of ranks that share half of their samples or more: several, or in two comparisons
        on end, as a data set may have a sample twice."""
        holders = defaultdict[int, list[int]](list)
        for rank, theirs in rows.items():
            for row in theirs:
                holders[row].append(rank)
        common = Counter((ranks[0], other) for ranks in holders.values() for other in ranks[1:])
        shared = {pair for pair, n in common.items() if 2 * n >= max(len(rows[rank]) for rank in pair)}
        found = {pair for pair in shared if common[pair] >= SEVERAL or pair in self._shared}
        self._shared = shared
        return found


def split(batch: Any, count: int) -> list[Any]:
    """Cut `batch` along its samples into `count` micro-batches that differ by one sample at most. Tensors,
    arrays, and lists of the same length are cut; everything else goes into each micro-batch.

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
    """Return the rows of each micro-batch, as `tensor_split` cuts: the first ones are the longer."""
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
    """Return one sample of zeros, for a tensor of none."""
    return tensor.new_zeros(1, *tensor.shape[1:]) if tensor.dim() else tensor


_SAME = "all {} data-parallel ranks train on the same batch, so that {} of them add nothing"
_SHARED = "ranks {} and {} have the same samples in their batches of step {}, which so count twice"
_SHARES = (
    "give each its own share, with engine.loader(dataset), or a DataLoader with "
    "sampler=DistributedSampler(dataset, dp.size, dp.rank), dp being engine.mesh.dp"
)
