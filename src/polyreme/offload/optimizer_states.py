"""The optimizer's numbers of one bucket in a tier: extents, each with an interval of the master and, behind
it, the same interval of every state.

Invariants: an extent has consecutive elements of one optimizer group (of one tensor, where the optimizer
needs whole ones), so it is all that the update of these elements reads and writes; the extents of a bucket
come in rising order. Communication: none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme.layout.bucket_layout import BucketLayout, GroupInterval, align
from polyreme.layout.intervals import Interval, ceil_div, chunks, overlap, round_up
from polyreme.layout.region import MASTER, Stored, slice_of
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
class StateField:
    """Where one state of an optimizer, such as `exp_avg`, lies in an extent: in its bytes from `begin` on."""

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
        """Return the numbers, as a view of the extent's bytes."""
        return memory[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StateExtent:
    """The elements of `interval`, in extent `number` of the tier, with `fields` by kind: MASTER, and the
    names of states."""

    interval: GroupInterval
    number: int
    fields: Mapping[str, StateField]

    @property
    def nbytes(self) -> int:
        return max(field.end for field in self.fields.values())


class OffloadedStates:
    """The masters, of `dtype`, and states of the elements `region` of one bucket's flat buffer, in
    extents reserved in `store`. `compact`: the format of states, if not torch's."""

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
            for piece in cut(interval, min(HOST_EXTENT, max(EXTENT, share)) if store.in_memory else EXTENT):
                fields = _fields(piece, groups[piece.group], dtype, compact)
                self._all.append(
                    StateExtent(piece, store.reserve(max(field.end for field in fields.values())), fields)
                )

    def __iter__(self) -> Iterator[StateExtent]:
        return iter(self._all)

    def write(self, kind: str, start: int, flat: Tensor) -> None:
        """Set the numbers of one kind, one for each element of the bucket's flat buffer from `start` on, of
        which this rank takes its own; or all of a state with a shape of its own, where `start` is its
        tensor's."""
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
        """Copy masters to `flat`, which begins at element `start` of the bucket's flat buffer. Padding in it
        is left as it is."""
        for extent in self._all:
            field, first = extent.fields[MASTER], extent.interval.start
            if inside := overlap(Interval(start, start + flat.numel()), Interval(first, first + field.size)):
                begin, size = field.begin + (inside.start - first) * field.dtype.itemsize, inside.size
                numbers = self.store.get(extent.number, begin, begin + size * field.dtype.itemsize)
                flat[inside.since(start)].copy_(numbers.view(field.dtype))

    def numbers(self, extent: StateExtent, kind: str, inside: GroupInterval | None) -> Tensor | Stored:
        """Return the extent's numbers of one kind, or those of the interval `inside` its own: in host memory,
        or to be read when they are needed."""
        field = extent.fields[kind]
        found = self.store.numbers(extent.number, field.begin, field.dtype, field.shape)
        if inside is None:
            return found
        return slice_of(found, *within(extent.interval, inside, field.size))

    def keep(self, extent: StateExtent, kind: str, inside: GroupInterval, numbers: Tensor) -> None:
        """Set the extent's numbers of one kind that belong to the interval `inside` its own."""
        field = extent.fields[kind]
        start, _ = within(extent.interval, inside, field.size)
        self.store.put(extent.number, numbers, field.begin + start * field.dtype.itemsize)


def within(whole: GroupInterval, inside: GroupInterval, size: int) -> tuple[int, int]:
    """Return the range of `inside` in the `size` numbers of the `whole` interval, which has one number for
    each element, or for some of them."""
    return (inside.start - whole.start) * size // whole.size, (inside.stop - whole.start) * size // whole.size


def cut(interval: GroupInterval, chunk: int) -> list[GroupInterval]:
    """Cut `interval` into shorter ones of at most `chunk` elements each. That of a whole tensor stays as it
    is."""
    if interval.slot is not None:
        return [interval]
    return [GroupInterval(interval.group, start, stop) for start, stop in chunks(interval, chunk)]


def _fields(
    interval: GroupInterval, group: Group, dtype: torch.dtype, compact: States | None
) -> dict[str, StateField]:
    """Return the fields of an extent: the master first, then every state that is more than one number."""
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
    fields = {MASTER: StateField(0, dtype, shape)}
    for kind, (form, sizes) in states.items():
        begin = round_up(max(field.end for field in fields.values()), _ALIGNED)
        fields[kind] = StateField(begin, form, sizes)
    return fields
