"""Reduction of gradients, as soon as a bucket's are complete in backward, in an order that is the same on
every rank.

Invariant: each bucket is reduced exactly once per reduction, whether or not every parameter got a gradient on
this rank, and no two ranks ever wait for different operations:
- Without sharded parameters nothing else is communicated in backward. Buckets are reduced when their last
  gradient arrives, in the reverse of the order in which the model registers their parameters (one that is
  complete early waits for its turn).
- With sharded parameters the order against the gathers matters too, so a block's buckets are reduced when
  backward has left the block (`complete`), the root's at the end; the arrival of gradients, which may differ
  between ranks, decides nothing.

A backward in two halves (`weight_gradients`) makes the gradients of parameters in its second half, which
gathers nothing.

With several micro-batches or pipeline stages, a bucket's gradients are added up on the rank until the last
backward that has some for it, unless every backward reduces its own.

At most IN_FLIGHT reductions hold their buffers at a time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from polyreme.errors import ModelError
from polyreme.pipeline.weight_gradients import current
from polyreme.tensor.gradient_states import GradientStates
from polyreme.zero.bucket import Bucket
from polyreme.zero.parameter import OWN_GRAD

IN_FLIGHT = 1
"""One block's reduction overlaps with the next one's backward; more would hold more than two blocks'
gradients."""


class Reducer:
    """Reduces the gradients of `buckets` (trainable ones, in registration order) as backward completes
    them."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stages: Collection[int] = (0,),
        gathers: bool = False,
        states: GradientStates | None = None,
    ) -> None:
        """`stages`: this rank's pipeline stages. `gathers`: True if backwards gather parameters, even only
        frozen ones. `states`: which gradients are whole under tensor parallelism."""
        self._order = list(reversed(buckets))
        self._index: dict[Tensor, tuple[Bucket, int]] = {
            parameter: (bucket, index)
            for bucket in buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self._stages, self.states = {*stages}, states
        self._left: dict[Bucket, int] = {}  # backwards to come
        self._gathers, self._by_arrival = gathers, not gathers
        self._whole = True  # True if the backward under way has no second half
        # buckets to reduce in this backward: their parameters without a gradient so far
        self._waiting: dict[Bucket, set[int]] = {}
        self._adding: set[Bucket] = set()  # buckets whose gradients of this backward are only added up
        self._in_flight: deque[Bucket] = deque()
        # hooks of the parameters whose gradients are reported
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._backward: Literal["own", "foreign"] | None = None  # the backward under way
        self.factor: float | None = None
        """The factor of the gradients of the backward under way, unless they are scaled already."""
        # parameters whose gradients autograd must report itself, as they are summed before they are taken
        self._summed: Collection[Tensor] = () if states is None else states.summed
        self.before: Callable[[Bucket], None] | None = None
        """A callback before a bucket's gradients are reduced."""
        self.unannounced: Callable[[], None] = _refuse
        """A callback for a gradient that no `begin` announced; it begins the backward."""

    @property
    def is_last(self) -> bool:
        """True if no further backward of the step is to begin."""
        return not any(self._left.values())

    @property
    def under_way(self) -> bool:
        """True if a backward has begun and not ended. One that failed never ends."""
        return self._backward == "own"

    @property
    def watched(self) -> bool:
        """True if parameters have hooks of the user's."""
        with torch._C.DisableTorchFunctionSubclass():  # reading them of released parameters takes longer
            return any(
                p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > (p in self._hooks)
                for p in self._index
            )

    def restart(self, microbatches: int) -> None:
        """Begin a step of so many micro-batches. An unfinished step before it is forgotten."""
        self._backward = None
        self.expect(microbatches)
        self._waiting.clear()
        self._adding.clear()
        self._in_flight.clear()
        self._listen(self._order)

    def expect(self, microbatches: int) -> None:
        """Set how many micro-batches' backwards come before the step is reduced."""
        self._left = {bucket: microbatches * len({*bucket.stages} & self._stages) for bucket in self._order}

    def close(self) -> None:
        """Remove the gradient hooks."""
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def begin(self, stage: int = 0, factor: float | None = None, last: bool = True) -> None:
        """Begin a backward of `stage`, whose gradients count times `factor`. Not `last`: another one of the
        same micro-batch follows."""
        used = self._of(stage)
        if factor is not None:  # autograd cannot add up scaled gradients
            self._take_back(used)
        self._begin(used, whole=True, last=last)
        self.factor = factor

    def begin_foreign(self) -> None:
        """Begin a backward of another engine's that passes through this model. Its gradients are dropped."""
        self._take_back(self._order)
        self._backward = "foreign"

    def begin_inputs(self, stage: int) -> None:
        """Begin the first half of a backward of `stage`: no parameter's gradient is taken, nor added by
        autograd to the buffer."""
        self._take_back(self._of(stage))

    def begin_weights(self, stage: int) -> None:
        """Begin the second half of a backward of `stage`, which gathers no parameters."""
        self.begin_inputs(stage)  # a whole backward may have come between the halves
        self._begin(self._of(stage), whole=False)

    def _of(self, stage: int) -> list[Bucket]:
        return [bucket for bucket in self._order if stage in bucket.stages]

    def _take_back(self, buckets: Sequence[Bucket]) -> None:
        """Make autograd add nothing to the buffers itself, and report every gradient."""
        self._listen(buckets)
        for bucket in buckets:
            bucket.gradients.take_back()

    def _begin(self, used: Sequence[Bucket], whole: bool, last: bool = True) -> None:
        self._by_arrival, self._whole = not (self._gathers and whole), whole
        self._backward, self.factor = "own", None
        for bucket in used if last else ():
            self._left[bucket] -= 1
        complete = [b for b in used if last and (b.gradients.sums.reduces_each or not self._left[b])]
        self._listen(complete)
        self._waiting = {bucket: set(range(len(bucket.parameters))) for bucket in complete}
        self._adding = {*used} - {*complete}

    def complete(self, buckets: Sequence[Bucket]) -> None:
        """Note, in a backward, that `buckets` get no more gradients. Buckets that are not to be reduced are
        ignored."""
        for bucket in [b for b in self._waiting if b in buckets]:
            self._reduce(bucket)

    def end(self, waits: bool = True) -> None:
        """End a backward: reduce the remaining buckets, with zero for parameters without gradient, and wait
        for all reductions. Unless it `waits`, those that are the last of their bucket may be under way until
        `finish`."""
        if self._backward == "foreign":
            self._backward = None
            return
        self.complete(self._order)
        if waits or any(self._left[bucket] for bucket in self._in_flight):
            self.finish()
        self._backward = None

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._finish_first()

    def gradient_buffer(self, parameter: Tensor) -> Tensor | None:
        """Return the buffer that sums the parameter's gradients of this step, in the second half of a
        backward. None where there is none yet, where it has another dtype, or where another hook listens."""
        bucket, index = self._index[parameter]
        open = bucket in self._waiting or bucket in self._adding
        alone = parameter in self._hooks and len(parameter._post_accumulate_grad_hooks or ()) == 1
        alone = alone and parameter not in self._summed
        return bucket.gradients.sum_of(index) if open and alone else None

    def so_far(self, parameter: Tensor) -> Tensor | None:
        """Return the sum of this rank's gradients of the parameter in this step; None before the first, or
        after a reduction. Between backwards."""
        bucket, index = self._index[parameter]
        self._take_back([bucket])
        return bucket.gradients.so_far(index)

    def added(self, parameter: Tensor) -> None:
        """Note that a complete gradient was added to `gradient_buffer`."""
        self._came(*self._index[parameter])

    def _listen(self, buckets: Sequence[Bucket]) -> None:
        """Hook every gradient of `buckets`, including those that autograd adds up by itself."""
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                # a script may have frozen it since
                if parameter not in self._hooks and parameter.requires_grad:
                    self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(
                        self._arrival(bucket, index)
                    )

    def _arrival(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        # autograd's memory holds this function, and Python's collector cannot free cycles through it
        reducer, its = (weakref.ref(self), weakref.ref(bucket))

        def arrived(parameter: Tensor) -> None:
            if (later := current()) is not None:
                later.defer(parameter, arrived)
            elif (mine := reducer()) is not None and (bucket := its()) is not None:
                mine._arrived(parameter, bucket, index)

        arrived.takes_gradient = True  # type: ignore[attr-defined]
        return arrived

    def _arrived(self, parameter: Tensor, bucket: Bucket, index: int) -> None:
        """Take the gradient that autograd gave a parameter."""
        if self._backward is None:
            self.unannounced()
        if self._backward == "foreign":
            OWN_GRAD.__set__(parameter, None)
            return
        if bucket in self._adding:
            if bucket.gradients.take(index, more=self._whole and self.factor is None, factor=self.factor):
                self._hooks.pop(parameter).remove()  # unhooked until the last backward
            return
        if bucket not in self._waiting:
            raise ModelError(f"parameter {bucket.layout.slots[index].name} "
                             "got a second gradient after its reduction began: "
                             "call backward once a micro-batch, "
                             "and use non-reentrant checkpoints")  # fmt: skip
        bucket.gradients.take(index, factor=self.factor)
        self._came(bucket, index)

    def _came(self, bucket: Bucket, index: int) -> None:
        """Note that parameter `index` has its last gradient of this reduction. Reduces the buckets that are
        complete and next in order."""
        if bucket in self._waiting:
            self._waiting[bucket].discard(index)
        while self._by_arrival and self._waiting and not self._waiting[first := next(iter(self._waiting))]:
            self._reduce(first)

    def _reduce(self, bucket: Bucket) -> None:
        del self._waiting[bucket]
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_first()
        if self.before is not None:
            self.before(bucket)
        bucket.gradients.reduce()
        self._in_flight.append(bucket)

    def _finish_first(self) -> None:
        bucket = self._in_flight.popleft()
        bucket.gradients.finish_reduce(last=not self._left[bucket])


def _refuse() -> None:
    raise ModelError("gradients came without a backward of the engine's")
