"""The reduced gradients of a bucket that do not stay on the device: from their last reduction in a step to
the update; or from the first one on, with those of all micro-batches added up.

Invariant: what is added is added in the order in which it was put. No communication between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from polyreme.layout.intervals import Interval, overlap
from polyreme.offload.store import Store

Final = Callable[[int, Tensor], object]
"""A function of the number of a first element, and of the step's gradients from there on, on the CPU."""


class OffloadedGradients:
    """Gradients of `dtype` in extents of `store`, of which each has the elements of one of `parts`.

    `adds`: whether gradients of several micro-batches are added up there. In files the parts are those of the
    optimizer's extents, so that the update streams both in one order."""

    def __init__(self, store: Store, parts: Sequence[Interval], dtype: torch.dtype, adds: bool) -> None:
        self.store, self.adds, self._parts, self._dtype = store, adds, parts, dtype
        self.extents = [store.reserve(part.size * dtype.itemsize) for part in parts]
        self._accumulates = False  # whether the next gradient is added to them

    def put(self, gradient: Tensor, final: Final | None = None) -> bool:
        """Begin to move `gradient`, of the bucket's region, there; of the reduce dtype, where none are added.
        `final` comes with the last of a step that are added. Returns whether the gradient has left its memory
        already."""
        store, gone = self.store, True
        store.copy_stream.settle()
        for extent, (start, stop) in zip(self.extents, self._parts, strict=True):
            then = None if final is None else partial(final, start)
            if self.adds:
                gone &= store.add(extent, gradient[start:stop], self._dtype, not self._accumulates, then)
            else:
                gone &= store.put(extent, gradient[start:stop])
        self._accumulates = self.adds
        return gone

    def settle(self) -> None:
        """Return when all that was put is there, and `final` has all parts."""
        self.store.settle(self.extents)

    def whole(self) -> Tensor:
        """What was put last, or the sum since `clear`: itself, in host memory."""
        (extent,), (part,) = self.extents, self._parts
        found = self.store.numbers(extent, 0, self._dtype, (part.size,))
        assert isinstance(found, Tensor), "these gradients are in files, and come by a stream"
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of the numbers [start, stop), on the CPU."""
        found = torch.zeros(stop - start, dtype=self._dtype)  # padding is in no extent
        for extent, inside, at in self._within(start, stop):
            numbers = self.store.get(extent, at, at + inside.size * self._dtype.itemsize)
            found[inside.since(start)] = numbers.view(self._dtype)
        return found

    def write(self, start: int, flat: Tensor) -> None:
        """Set the numbers from `start` on."""
        for extent, inside, at in self._within(start, start + flat.numel()):
            self.store.put(extent, flat[inside.since(start)].to("cpu", self._dtype), at)

    def clear(self) -> None:
        """Forget the step before; called before the first gradient of a step, and before memory of the device
        that gradients were in is written again."""
        self.settle()
        self.store.copy_stream.settle()
        self._accumulates = False

    def release(self) -> None:
        """Give the space back."""
        for extent in self.extents:
            self.store.release(extent)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, Interval, int]]:
        """Extents that have any of the numbers [start, stop): which ones, and from which byte on."""
        for extent, part in zip(self.extents, self._parts, strict=True):
            if inside := overlap(Interval(start, stop), part):
                yield extent, inside, (inside.start - part.start) * self._dtype.itemsize
