"""The optimizer's numbers of one bucket in a tier: extents, each with a part of the master and, behind it,
that part of every state.

Invariants: an extent is of consecutive elements of one optimizer group (of one tensor, where the optimizer
looks at whole ones), so it is all that the update of these elements reads and writes; the extents of a bucket
come in rising order. Communication: none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme.layout.bucket_layout import BucketLayout, GroupInterval, align
from polyreme.layout.intervals import Interval, ceil_div, chunks, overlap, round_up
from polyreme.layout.region import MASTER, Stored, part_of
from polyreme.offload.store import Store
from polyreme.optim.groups import Group, trial_state
from polyreme.optim.quantized_states import QuantizedKernel, States

EXTENT = 1 << 20
"""Most elements of an extent, a multiple of ALIGN: AdamW's are 12 MiB, of which a stream of files holds
five."""
HOST_EXTENT = 1 << 22
"""The same in host memory, where each thread takes extents of its own, if there are enough."""

_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Field:
    """Where an extent has its numbers of one kind: in the bytes from `begin` on."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def end(self) -> int:
        return self.begin + self.size * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The numbers, in the extent's bytes."""
        return memory[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StateExtent:
    """The elements of `interval`, extent `number` of the tier, with `fields` by kind: MASTER, and the names
    of states."""

    interval: GroupInterval
    number: int
    fields: Mapping[str, Field]

    @property
    def nbytes(self) -> int:
        return max(field.end for field in self.fields.values())


class OffloadedStates:
    """The states of one bucket: of the part `region` of its flat buffer, with masters of `dtype`. Reserves
    them in `store`. `compact`: how states are kept, if not as torch does."""

    def __init__(
        self,
        layout: BucketLayout,
        region: slice,
        groups: Sequence[Group],
        dtype: torch.dtype,
        store: Store,
        compact: States | None = None,
    ) -> None:
        self.store = store
        self._all: list[StateExtent] = []
        for interval in layout.group_intervals(region.start, region.stop):
            share = align(ceil_div(interval.size, torch.get_num_threads()))
            for part in cut(interval, min(HOST_EXTENT, max(EXTENT, share)) if store.in_memory else EXTENT):
                fields = _fields(part, groups[part.group], dtype, compact)
                self._all.append(
                    StateExtent(part, store.reserve(max(field.end for field in fields.values())), fields)
                )

    def __iter__(self) -> Iterator[StateExtent]:
        return iter(self._all)

    def write(self, kind: str, start: int, flat: Tensor) -> None:
        """Set the numbers of one kind, one for each of the elements from `start` of the bucket's flat buffer
        on, as far as they are here; of a state with a shape of its own all, where `start` is its tensor's."""
        for extent in self._all:
            first = extent.interval.start
            if (field := extent.fields.get(kind)) is None or (
                extent.interval.slot is not None and first != start
            ):
                continue
            if inside := overlap(Interval(start, start + flat.numel()), Interval(first, first + field.size)):
                numbers = flat[inside.since(start)].to("cpu", field.dtype)
                begin = field.begin + (inside.start - first) * field.dtype.itemsize
                self.store.put(extent.number, numbers, begin)

    def read_master(self, flat: Tensor, start: int) -> None:
        """Copy masters to `flat`, which begins at element `start` of the bucket's flat buffer; what is
        padding there stays."""
        for extent in self._all:
            field, first = extent.fields[MASTER], extent.interval.start
            if inside := overlap(Interval(start, start + flat.numel()), Interval(first, first + field.size)):
                begin, size = field.begin + (inside.start - first) * field.dtype.itemsize, inside.size
                numbers = self.store.get(extent.number, begin, begin + size * field.dtype.itemsize)
                flat[inside.since(start)].copy_(numbers.view(field.dtype))

    def numbers(self, extent: StateExtent, kind: str, part: GroupInterval | None) -> Tensor | Stored:
        """The extent's numbers of one kind, or those of a part of its interval: in host memory, or to be read
        when they are needed."""
        field = extent.fields[kind]
        found = self.store.numbers(extent.number, field.begin, field.dtype, field.shape)
        if part is None:
            return found
        return part_of(found, *within(extent.interval, part, field.size))

    def keep(self, extent: StateExtent, kind: str, part: GroupInterval, numbers: Tensor) -> None:
        """Set the extent's numbers of one kind that belong to a part of its interval."""
        field = extent.fields[kind]
        start, _ = within(extent.interval, part, field.size)
        self.store.put(extent.number, numbers, field.begin + start * field.dtype.itemsize)


def within(whole: GroupInterval, part: GroupInterval, size: int) -> tuple[int, int]:
    """Where the part of an interval is in the `size` numbers that there are of the whole: one for each
    element, or one for some of them."""
    return (part.start - whole.start) * size // whole.size, (part.stop - whole.start) * size // whole.size


def cut(interval: GroupInterval, chunk: int) -> list[GroupInterval]:
    """`interval` in parts of at most `chunk` elements each, or as it is where it is one whole tensor."""
    if interval.slot is not None:
        return [interval]
    return [GroupInterval(interval.group, *part) for part in chunks(interval, chunk)]


def _fields(
    interval: GroupInterval, group: Group, dtype: torch.dtype, compact: States | None
) -> dict[str, Field]:
    """The master first, then every state that is more than one number."""
    shape = (interval.size,) if interval.slot is None else interval.slot.shape
    states: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if compact is not None:
        formats = QuantizedKernel(group.optimizer([torch.zeros(1, dtype=dtype)]), compact).fields(
            interval.size
        )
        states = {kind: (form, (size,)) for kind, (form, size) in formats.items()}
    else:
        for kind, value in trial_state(group, None if interval.slot is None else shape, dtype).items():
            if isinstance(value, Tensor) and value.dim():
                states[kind] = value.dtype, shape if interval.slot is None else tuple(value.shape)
    fields = {MASTER: Field(0, dtype, shape)}
    for kind, (form, sizes) in states.items():
        begin = round_up(max(field.end for field in fields.values()), _ALIGNED)
        fields[kind] = Field(begin, form, sizes)
    return fields
