"""The contiguous pieces of a bucket's master shard that are updated one by one.

Invariant: a piece belongs to one optimizer group, and begins and ends at multiples of ALIGN, so that results
do not depend on the cut. No communication."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.errors import ConfigError, Problem
from polyreme.layout.bucket_layout import GroupInterval, Slot, align
from polyreme.layout.intervals import ceil_div
from polyreme.offload.host_transfer import shares_cpu_memory
from polyreme.offload.optimizer_states import StateExtent, cut, within
from polyreme.optim.cpu_kernels import ChunkedKernel, Kernel, kernel
from polyreme.optim.groups import Group, trial_state
from polyreme.optim.quantized_states import QuantizedKernel, States
from polyreme.zero.bucket import Bucket

CHUNK = 1 << 22
"""Most elements of a piece on a CPU, a multiple of ALIGN, where a kernel walks it in chunks that fit the
cache."""
IN_CACHE = 1 << 19
"""Most elements of a piece that torch's own optimizer updates on a CPU, so that each of its passes finds the
piece in the cache. Also the fewest elements of a piece when pieces are divided among threads."""


@dataclass(eq=False)
class Piece:
    """An interval of the master shard, with its master `tensor` and all of its states; or with the extent
    that holds them, and in `state` the states that the extent does not. `fresh`: it was never updated."""

    interval: GroupInterval
    tensor: Tensor | None = None
    extent: StateExtent | None = None
    state: dict[str, Any] = field(default_factory=dict)
    fresh: bool = True

    def within(self, extent: StateExtent, numbers: Tensor) -> Tensor:
        """Return this piece's elements of an extent's `numbers` of one kind."""
        return (
            numbers
            if self.interval.slot is not None
            else numbers[slice(*within(extent.interval, self.interval, numbers.numel()))]
        )


class Pieces:
    """The pieces of one bucket's master shard, with a torch optimizer and a kernel for each optimizer
    group."""

    def __init__(self, bucket: Bucket, groups: Sequence[Group], compact: States | None) -> None:
        """`compact`: the format of moments, if not torch's. Raises ConfigError where an optimizer's moments
        cannot have it."""
        self.bucket, self.compact, self._groups = bucket, compact, groups
        self.offloaded = bucket.offloaded_states
        """The store of masters and states, if they are not in device memory."""
        self.one_by_one = shares_cpu_memory(bucket.device) or self.offloaded is not None
        """True if each piece is scaled and updated before the next is read; else all pieces of a group are
        updated at once."""
        self.options: Sequence[Mapping[str, Any]] = ()
        """Current options of the groups, which may give the optimizer other states than the options that it
        was made with."""
        self._trials: dict[str, dict[str, Any]] = {}
        if self.offloaded is not None:
            self._pieces = [Piece(extent.interval, extent=extent) for extent in self.offloaded]
        else:
            whole = bucket.layout.group_intervals(bucket.region.start, bucket.region.stop)
            chunks = {interval.group: self._chunk(interval) for interval in whole}
            intervals = [each for interval in whole for each in cut(interval, chunks[interval.group])]
            self._pieces = [Piece(interval, self.view(bucket.resident, interval)) for interval in intervals]
        self.optimizers = {
            group: self._optimizer(group)
            for group in sorted({piece.interval.group for piece in self._pieces})
        }
        self._kernels = {group: _kernel(optimizer, compact) for group, optimizer in self.optimizers.items()}
        name = bucket.layout.slots[0].name if bucket.layout.slots else ""
        # seeds random bits, so that they differ between buckets
        self.random_offset = zlib.crc32(name.encode()) << 32
        if compact is not None and not self.one_by_one:
            raise ConfigError([Problem("optimizer.states", compact, "moments that are kept in fewer "
                                                                    "bits are updated by the CPU",
                                       'write memory.states = "host" (or a '
                                       'folder), or optimizer.states = "fp32"')])  # fmt: skip

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def kernel(self, piece: Piece) -> Kernel:
        """Return the kernel of a piece."""
        return self._kernels[piece.interval.group]

    def begin_states(self, piece: Piece, tensor: Tensor) -> dict[str, Any] | None:
        """Return the states that the optimizer makes for a piece's masters in its constructor; None if it
        makes none."""
        return self._groups[piece.interval.group].optimizer([tensor]).state.get(tensor)

    def _optimizer(self, group: int) -> Optimizer:
        """Make the optimizer of a group, and give its pieces the states that its constructor makes."""
        pieces = [piece for piece in self._pieces if piece.interval.group == group]
        # the kernel of moments in fewer bits is that of the CPU, also where masters are on the meta device
        own = pieces if self.compact is None else []
        tensors = [piece.tensor for piece in own if piece.tensor is not None]
        slot = pieces[0].interval.slot
        sizes = 1 if slot is None else [1] * len(slot.shape)
        stand_in = torch.zeros(sizes, dtype=self.bucket.formats.master)
        optimizer = self._groups[group].optimizer(tensors or [stand_in])
        for piece in own:
            piece.state = optimizer.state.pop(piece.tensor, {})  # type: ignore[arg-type]
            piece.fresh = not piece.state
        return optimizer

    def _chunk(self, interval: GroupInterval) -> int:
        """Return the most elements of a piece of the interval's group."""
        if not self.one_by_one or interval.slot is not None:
            return self.bucket.layout.size
        found = _kernel(self._groups[interval.group].optimizer([torch.zeros(1)]), self.compact)
        if isinstance(found, ChunkedKernel):
            return min(CHUNK, max(IN_CACHE, align(ceil_div(interval.size, torch.get_num_threads()))))
        return CHUNK if isinstance(found, QuantizedKernel) else IN_CACHE

    def trial(self, group: int, shape: tuple[int, ...] | None) -> dict[str, Any]:
        """Return the states of a tensor of `shape` (None: of a flat piece) of a group after one step on
        zeros."""
        device = torch.device("cpu") if self.offloaded is not None else self.bucket.device
        made, own = self._groups[group], self.options[group] if self.options else {}
        options = {**made.options, **{key: own[key] for key in own if key not in ("params", "fused")}}
        key = f"{group} {options}"
        if shape is not None or key not in self._trials:
            made = replace(made, options=options)
            found = trial_state(made, shape, self.bucket.formats.master, device)
            if shape is not None:
                return found
            self._trials[key] = found
        return self._trials[key]

    def view(self, numbers: Tensor, interval: GroupInterval, start: int | None = None) -> Tensor:
        """Return the interval's elements of `numbers`, which begin at element `start` of the flat buffer
        (default: of the region)."""
        start = self.bucket.region.start if start is None else start
        flat = numbers[interval.start - start : interval.stop - start]
        return flat.view(interval.slot.shape) if interval.slot is not None else flat

    def isolate(self, slot: Slot) -> None:
        """Give the parameter pieces of its own, with its elements of the states and its own step count."""
        low, high = slot.start, align(slot.stop)
        pieces: list[Piece] = []
        for piece in self._pieces:
            cuts = [
                piece.interval.start,
                *(c for c in (low, high) if piece.interval.start < c < piece.interval.stop),
                piece.interval.stop,
            ]
            if len(cuts) == 2 or piece.interval.slot is not None:
                pieces.append(piece)
                continue
            for start, stop in pairwise(cuts):
                interval = GroupInterval(piece.interval.group, start, stop)
                inside = slice(start - piece.interval.start, stop - piece.interval.start)
                whole = piece.interval.size
                state = {key: _slice_state(value, inside, whole) for key, value in piece.state.items()}
                tensor = None if piece.tensor is None else self.view(self.bucket.resident, interval)
                pieces.append(Piece(interval, tensor, piece.extent, state, piece.fresh))
        self._pieces = pieces


def _slice_state(value: Any, inside: slice, whole: int) -> Any:
    """Return what a state has for the elements `inside` a piece of `whole` elements: a slice of
    per-element (or per-ALIGN) numbers, a copy of a single number."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return value.clone()
    return value[inside.start * value.numel() // whole : inside.stop * value.numel() // whole]


def _kernel(optimizer: Optimizer, compact: States | None) -> Kernel:
    if compact is None:
        return kernel(optimizer)
    try:
        return QuantizedKernel(optimizer, compact)
    except ValueError as error:
        fix = 'use adamw, adam, lion, adagrad, or sgd with momentum, or write optimizer.states = "fp32"'
        raise ConfigError([Problem("optimizer.states", compact, str(error), fix)]) from error
