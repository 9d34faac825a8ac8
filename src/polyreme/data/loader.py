"""Divides global batches over data-parallel ranks. No communication.

Invariants: the samples of global batch k of an epoch depend only on (seed, epoch), never on the number of
ranks; rank r takes the r-th contiguous share, so that the ranks' shares in order are the global batch. The
position counts samples over all ranks, of batches that were handed out, so a run resumes at the very sample
where it stopped, on any number of ranks, with any prefetch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset, default_collate

from polyreme.errors import BatchError, DataError

Position = tuple[int, int]  # epoch, and samples of it already handed out over all ranks


def share(count: int, rank: int, world: int) -> slice:
    """Return the contiguous share of `rank` in a global batch of `count` samples; shares differ by at most
    one sample."""
    return slice(count * rank // world, count * (rank + 1) // world)


def permutation(size: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch's samples, int64 of shape (size,), which depends only on the arguments."""
    # Hashed, because neighbouring seeds of torch's generator need not be independent.
    mixed = int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()) >> 1
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))


class Loader:
    """This rank's share of each global batch of a dataset.

    A `for` loop begins at the current position and, unless `epochs` is given, never ends: leave it with
    `break`. The next loop resumes there. `len` is the number of batches of one epoch. Only one loop may run
    at a time.

    Args:
        dataset: anything with `len` and `[i]` (torch's map-style datasets, Hugging Face `datasets`, a list),
            or torch's `IterableDataset`, which has its own order: every rank reads the same stream and keeps
            its share, `shuffle` has no effect, and resuming reads and drops the samples handed out before.
        batch_size: samples of one optimizer step over all ranks.
        rank: this rank on the data-parallel axis.
        world: size of the data-parallel axis.
        seed: of the order of samples.
        shuffle: a new order each epoch; otherwise that of the dataset.
        drop_last: leave out the samples after the last whole batch of an epoch. Otherwise they make a smaller
            batch, of which ranks may have none: their tensors are empty then.
        collate: makes a batch of a list of this rank's samples. By default, tensors, arrays, numbers and
            lists of numbers are stacked inside of dicts and tuples.
        prefetch: batches prepared ahead in the background; 0 prepares each when it is asked for.
        pin: put tensors into page-locked memory, for asynchronous copies to a GPU. No effect without CUDA.
        workers: threads that prepare batches (one for a stream); 0 turns prefetch off.
        epochs: epochs of one `for` loop; None: epoch after epoch without end, each in a new order.

    Raises:
        BatchError: `batch_size` that cannot be shared equally, or samples that cannot be stacked.
        DataError: a dataset smaller than one global batch, or not a dataset. The loop passes on errors of the
            dataset itself.
    """

    def __init__(  # noqa: PLR0913 (each is a keyword of the user's)
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        pin: bool = False,
        workers: int = 1,
        epochs: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world = world
        self.seed = seed
        self.shuffle, self.drop_last, self.epochs, self.workers = shuffle, drop_last, epochs, workers
        self.prefetch = prefetch if workers else 0
        self.collate = collate or stack
        self.pin = pin and torch.cuda.is_available()
        self.is_stream = isinstance(dataset, IterableDataset)
        self._position: Position = (0, 0)
        self.began: Position | None = None
        """Where the batch that was handed out last begins."""
        self._check_arguments()
        if not self.is_stream:
            self._check_size()

    @property
    def epoch(self) -> int:
        """The number of epochs handed out completely."""
        return self._position[0]

    def __len__(self) -> int:
        if self.is_stream:
            raise TypeError("the length of a stream is not known")
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def state_dict(self) -> dict[str, int | None]:
        """Return the position, the same on every rank, as plain numbers."""
        epoch, sample = self._position
        return {"epoch": epoch, "sample": sample, "seed": self.seed, "size": self._size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of `state`, taken with any number of ranks and any batch size.

        Raises:
            DataError: a state of another dataset or seed, whose samples come in another order.
        """
        if set(state) != set(self.state_dict()) or not all(
            isinstance(state[k], int) for k in ("epoch", "sample")
        ):
            raise DataError(f"not the state of a loader: {dict(state)!r}. Pass what state_dict() returned")
        for key, own in (("seed", self.seed), ("size", self._size())):
            if state[key] != own:
                raise DataError(
                    f"cannot resume the data: its {key} was {state[key]} "
                    f"and is now {own}, so the samples come in "
                    f"another order. Restore the {key}, or start this loader from its beginning"
                )
        self._position = (state["epoch"], state["sample"])

    def __iter__(self) -> Iterator[Any]:
        stop = None if self.epochs is None else (self.epoch // self.epochs + 1) * self.epochs
        jobs = self._stream_jobs(stop) if self.is_stream else self._index_jobs(stop)
        ahead: deque[Future[tuple[Position, Any] | None]] = deque()
        pool = ThreadPoolExecutor(
            1 if self.is_stream else max(1, self.workers), thread_name_prefix="polyreme-loader"
        )
        is_ending = sys.is_finalizing
        try:
            while True:
                ahead.extend(pool.submit(job) for job in islice(jobs, self.prefetch + 1 - len(ahead)))
                done = ahead.popleft().result() if ahead else None
                if done is None:
                    break
                before, (self._position, batch) = self._position, done
                # a stream's epoch ends with a batch that is not handed out
                is_next = self._position[0] > before[0] and self._position[1] > 0
                self.began = (self._position[0], 0) if is_next else before
                yield batch
            if stop is not None:
                self._position = (stop, 0)
        finally:  # also when the loop is left or this generator is collected
            if not is_ending():  # when Python ends, the threads are gone, and so are modules that this needs
                pool.shutdown(wait=False, cancel_futures=True)

    def _index_jobs(self, stop: int | None) -> Iterator[Callable[[], tuple[Position, Any]]]:
        epoch, start = self._position
        size = len(self.dataset)
        while epoch != stop:
            order = permutation(size, self.seed, epoch) if self.shuffle else torch.arange(size)
            while (count := min(self.batch_size, size - start)) == self.batch_size or (
                count and not self.drop_last
            ):
                own = share(count, self.rank, self.world)
                indices, any_sample = order[start:][own], int(order[start])
                start += count
                rest = size - start
                ended = rest < self.batch_size if self.drop_last else rest == 0
                yield partial(self._build, (epoch + 1, 0) if ended else (epoch, start), indices, any_sample)
            epoch, start = epoch + 1, 0

    def _build(self, position: Position, indices: torch.Tensor, any_sample: int) -> tuple[Position, Any]:
        fetch_all = getattr(self.dataset, "__getitems__", None)
        own = indices.tolist() or [any_sample]
        return position, self._finish(
            fetch_all(own) if fetch_all else [self.dataset[index] for index in own], empty=not len(indices)
        )

    def _stream_jobs(self, stop: int | None) -> Iterator[Callable[[], tuple[Position, Any] | None]]:
        batches = self._stream_batches(stop)
        while True:
            yield partial(next, batches, None)

    def _stream_batches(self, stop: int | None) -> Iterator[tuple[Position, Any]]:
        epoch, start = self._position
        while epoch != stop:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            samples = islice(iter(self.dataset), start, None)
            while block := list(islice(samples, self.batch_size)):
                if len(block) < self.batch_size and self.drop_last:
                    break
                start += len(block)
                own = block[share(len(block), self.rank, self.world)]
                yield (epoch, start), self._finish(own or block[:1], empty=not own)
            if start == 0:
                raise DataError(
                    f"the stream ended after {len(block)} samples, before one "
                    f"global batch of {self.batch_size}: use a smaller batch.size"
                )
            epoch, start = epoch + 1, 0

    def _finish(self, samples: list[Any], empty: bool) -> Any:
        """Make the batch of `samples`; with `empty`, one of the same form without samples."""
        batch = self.collate(samples)
        if empty:
            batch = tree_map_only(torch.Tensor, lambda tensor: tensor[:0] if tensor.dim() else tensor, batch)
        return _pinned(batch) if self.pin else batch

    def _size(self) -> int | None:
        return None if self.is_stream else len(self.dataset)

    def _check_arguments(self) -> None:
        size, world = self.batch_size, self.world
        if world < 1 or not 0 <= self.rank < world:
            raise BatchError(
                f"rank {self.rank} of {world} ranks: the rank must be from 0 to the number of ranks - 1"
            )
        if size < 1 or size % world:
            near = sorted({max(size // world, 1) * world, (size // world + 1) * world})
            raise BatchError(
                f"batch size {size} cannot be shared equally by "
                f"{world} ranks: use {' or '.join(map(str, near))}"
            )
        least = {"prefetch": 0, "workers": 0, "epochs": 1}
        for name, value in {
            "prefetch": self.prefetch,
            "workers": self.workers,
            "epochs": self.epochs,
        }.items():
            if value is not None and value < least[name]:
                raise BatchError(f"{name} = {value}: must be at least {least[name]}")

    def _check_size(self) -> None:
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
            raise DataError(
                f"not a dataset: {type(self.dataset).__name__}. "
                "Pass something with __len__ and __getitem__, or a "
                "torch.utils.data.IterableDataset"
            )
        size = len(self.dataset)
        if size < self.batch_size and (self.drop_last or not size):
            raise DataError(
                f"the dataset has {size} samples, fewer than one global batch "
                f"of {self.batch_size}: use more data or a smaller batch.size"
            )


def stack(samples: list[Any]) -> Any:
    """Stack samples by torch's default collate, with lists of numbers (as in Hugging Face datasets) as
    tensors.

    Raises:
        BatchError: samples of unlike shapes.
    """
    try:
        return default_collate([_tensors(sample) for sample in samples])
    except (RuntimeError, TypeError, KeyError) as error:
        raise BatchError(
            f"the samples of a batch cannot be stacked: {error}. "
            "Give them equal keys and shapes, or pass collate="
        ) from error


def _tensors(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _tensors(value) for key, value in sample.items()}
    if isinstance(sample, tuple):
        made = [_tensors(value) for value in sample]
        return type(sample)(*made) if hasattr(sample, "_fields") else tuple(made)
    leaf = sample
    while isinstance(leaf, list) and leaf:
        leaf = leaf[0]
    if isinstance(sample, list) and isinstance(leaf, int | float):
        try:
            return torch.tensor(sample)
        except (TypeError, ValueError) as error:  # ragged, or of mixed kinds
            raise BatchError(f"a list in a sample is no array of numbers: {error}. Pass collate=") from error
    return sample


def _pinned(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return {key: _pinned(value) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        made = [_pinned(value) for value in batch]
        return (
            type(batch)(*made)
            if hasattr(batch, "_fields")
            else tuple(made)
            if isinstance(batch, tuple)
            else made
        )
    return batch
