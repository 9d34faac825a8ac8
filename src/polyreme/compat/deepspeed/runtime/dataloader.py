"""Loaders of a training loop: one that never ends, and one that gives each rank its share of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import refused


class RepeatingLoader:
    """Iterates over `loader` again whenever it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """The batches of `batch_size` samples of one data-parallel rank.

    Without `data_sampler` a rank takes every n-th sample, of n ranks (with `local_rank` -1: samples at
    random, and a batch for each device). By default two workers per device read. `tput_timer` is started
    before each batch. Raises UnsupportedError for a curriculum."""

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
        self.deepspeed_dataloader_config = deepspeed_dataloader_config or {}
        self.curriculum_learning_enabled = False
        self.device_count = 1 if local_rank >= 0 else get_accelerator().device_count()
        if data_sampler is None:
            data_sampler = (
                DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
                if local_rank >= 0
                else RandomSampler(dataset)
            )
        self.dataset, self.data_sampler, self.collate_fn = dataset, data_sampler, collate_fn
        self.batch_size = batch_size * self.device_count
        workers = 2 * self.device_count if num_local_io_workers is None else num_local_io_workers
        self.num_local_io_workers = workers
        self.pin_memory, self.dataloader_drop_last = pin_memory, dataloader_drop_last
        self.tput_timer, self.post_process_func = tput_timer, None
        self.data: Iterator[Any] | None = None
        samples = len(data_sampler)
        self.len = samples // self.batch_size if dataloader_drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> DeepSpeedDataLoader:
        self.dataloader = DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            pin_memory=self.pin_memory,
            sampler=self.data_sampler,
            collate_fn=self.collate_fn,
            num_workers=self.num_local_io_workers,
            drop_last=self.dataloader_drop_last,
        )
        self.data = iter(self.dataloader)
        return self

    def __len__(self) -> int:
        return self.len

    def __next__(self) -> Any:
        if self.data is None:
            iter(self)
        if self.tput_timer:
            self.tput_timer.start()
        assert self.data is not None
        return next(self.data)
