"""When gradients are reduced: as soon as a bucket's are complete in backward, in an order that is the same on every rank.

Invariant: buckets are reduced in the reverse of the order in which the model registers their parameters, each exactly once per
reduction, whatever order autograd finishes them in and whether or not every parameter got a gradient. So no two ranks can ever
wait for different buckets. At most IN_FLIGHT reductions hold their buffers at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from polyreme.errors import ModelError
from polyreme.zero.bucket import Bucket

IN_FLIGHT = 2


class Reducer:
    """Follows the gradients of `buckets` (trainable ones, in registration order) through backward."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._order = list(reversed(buckets))
        self._waiting: list[set[int]] = [set() for _ in self._order]  # parameters without a gradient yet in this backward
        self._next = len(self._order)
        self._in_flight: deque[Bucket] = deque()
        self._armed = False
        for at, bucket in enumerate(self._order):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._arrival(at, bucket, index))

    def begin(self, reduce: bool) -> None:
        """Before a backward: `reduce` says whether its gradients complete a reduction (else they are added up on this rank)."""
        self._waiting = [set(range(len(bucket.parameters))) for bucket in self._order]
        self._next, self._armed = 0, reduce

    def end(self) -> None:
        """After a backward: reduce what it left, parameters without gradient as zero, and wait for all reductions."""
        if self._armed:
            self._waiting = [set() for _ in self._order]
            self._advance()
        while self._in_flight:
            self._in_flight.popleft().finish_reduce()
        self._armed = False

    def _arrival(self, at: int, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if self._armed and at < self._next:
                raise ModelError(f"parameter {bucket.layout.slots[index].name} got a second gradient after its reduction began: "
                                 "call backward once a micro-batch, and use non-reentrant checkpoints")  # fmt: skip
            bucket.take_grad(index)
            self._waiting[at].discard(index)
            if self._armed and at == self._next:
                self._advance()

        return arrived

    def _advance(self) -> None:
        """Begin the reduction of every complete bucket that is next in order."""
        while self._next < len(self._order) and not self._waiting[self._next]:
            while len(self._in_flight) >= IN_FLIGHT:
                self._in_flight.popleft().finish_reduce()
            bucket = self._order[self._next]
            bucket.reduce()
            self._in_flight.append(bucket)
            self._next += 1
