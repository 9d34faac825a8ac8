"""The reduced gradients of a bucket off the device: from the last reduction of a step to the update; or from
the first one on, with those of all micro-batches added up.

Invariant: gradients are added in the order in which they were put. No communication between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from polyreme.layout.intervals import Interval, overlap
from polyreme.offload.store import Store

Final = Callable[[int, Tensor], object]
"""A callback with the number of a first element, and the step's gradients from there on, on the CPU."""


class OffloadedGradients:
    """Gradients of `dtype` in extents of `store`, one for each of the `intervals` of elements.

    `adds`: whether gradients of several micro-batches are added up there. In files these are the intervals of
    the optimizer's extents, so that the update streams both in one order."""

    def __init__(self, store: Store, intervals: Sequence[Interval], dtype: torch.dtype, adds: bool) -> None:
        self.store, self.adds, self._intervals, self._dtype = store, adds, intervals, dtype
        self.extents = [store.reserve(interval.size * dtype.itemsize) for interval in intervals]
        self._accumulates = False  # True if the next gradient is added to the stored ones

    def put(self, gradient: Tensor, final: Final | None = None) -> bool:
        """Begin to move `gradient`, of the bucket's region, to the store; in the reduce dtype, unless they
        are added up. Pass `final` with the last of a step that are added up. Returns whether the gradient has
        left its memory already."""
        store, gone = self.store, True
        store.copy_stream.settle()
        for extent, (start, stop) in zip(self.extents, self._intervals, strict=True):
            then = None if final is None else partial(final, start)
            if self.adds:
                gone &= store.add(extent, gradient[start:stop], self._dtype, not self._accumulates, then)
            else:
                gone &= store.put(extent, gradient[start:stop])
        self._accumulates = self.adds
        return gone

    def settle(self) -> None:
        """Wait until all gradients are stored, and `final` was called for all of them."""
        self.store.settle(self.extents)

    def whole(self) -> Tensor:
        """Return the last gradients, or their sum since `clear`, in place in host memory."""
        (extent,), (interval,) = self.extents, self._intervals
        found = self.store.numbers(extent, 0, self._dtype, (interval.size,))
        assert isinstance(found, Tensor), "these gradients are in files, and come by a stream"
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of the numbers [start, stop), on the CPU."""
        found = torch.zeros(stop - start, dtype=self._dtype)  # zeros for padding, which no extent has
        for extent, inside, at in self._within(start, stop):
            numbers = self.store.get(extent, at, at + inside.size * self._dtype.itemsize)
            found[inside.since(start)] = numbers.view(self._dtype)
        return found

    def write(self, start: int, flat: Tensor) -> None:
        """Set the numbers from `start` on."""
        for extent, inside, at in self._within(start, start + flat.numel()):
            self.store.put(extent, flat[inside.since(start)].to("cpu", self._dtype), at)

    def clear(self) -> None:
        """Forget the step before. Call it before the first gradient of a step, and before device memory of
        gradients is written again."""
        self.settle()
        self.store.copy_stream.settle()
        self._accumulates = False

    def release(self) -> None:
        """Free the extents."""
        for extent in self.extents:
            self.store.release(extent)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, Interval, int]]:
        """Yield each extent that has any of the numbers [start, stop): its number, which of them it has, and
        the byte with which they begin."""
        for extent, interval in zip(self.extents, self._intervals, strict=True):
            if inside := overlap(Interval(start, stop), interval):
                yield extent, inside, (inside.start - interval.start) * self._dtype.itemsize
