"""Data loaders of a training loop: one that never ends, and one that gives each rank its share of a data
set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import refused


class RepeatingLoader:
    """An endless iterator over the batches of `loader`, which begins it again whenever it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.data_iter = loader, iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)  # no `for`: iter() begins a DeepSpeedDataLoader again
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """An iterator over the batches of one data-parallel rank, of `batch_size` samples each.

    Without `data_sampler` each of n ranks takes every n-th sample. With `local_rank` -1 one process takes
    samples at random, and each batch is of `batch_size` samples per device. By default two worker processes
    per device read the samples. `tput_timer` is started before each batch. Raises UnsupportedError for a
    curriculum."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if (deepspeed_dataloader_config or {}).get("curriculum_learning"):
            raise refused(
                "curriculum learning",
                "Polyreme has no sampler that orders samples by difficulty",
                "take data_efficiency.data_sampling.curriculum_learning out of the config",
            )
        self.device_count = 1 if local_rank >= 0 else get_accelerator().device_count()
        if data_sampler is None:
            data_sampler = (
                DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
                if local_rank >= 0
                else RandomSampler(dataset)
            )
        self.dataset, self.data_sampler, self.tput_timer = dataset, data_sampler, tput_timer
        workers = 2 * self.device_count if num_local_io_workers is None else num_local_io_workers
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size * self.device_count,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=workers,
            drop_last=dataloader_drop_last,
        )
        self.data: Iterator[Any] | None = None

    def __iter__(self) -> DeepSpeedDataLoader:
        self.data = iter(self.dataloader)
        return self

    def __len__(self) -> int:
        return len(self.dataloader)

    def __next__(self) -> Any:
        if self.data is None:
            self.data = iter(self.dataloader)
        if self.tput_timer:
            self.tput_timer.start()
        return next(self.data)
