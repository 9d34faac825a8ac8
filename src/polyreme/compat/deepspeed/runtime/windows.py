"""The windows of micro-batches of DeepSpeed's engine, each of which is one step: where they end, and when
their gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

import polyreme
from polyreme.compat.deepspeed.json_config import Batch, Translation
from polyreme.compat.deepspeed.refusal import OrderError, refused


class Windows(nn.Module):
    """The part of an engine that tells Polyreme's which backward is the last of a window.

    That is by default the last of every `gradient_accumulation_steps`, by the count of `step` calls; or the
    one that `set_gradient_accumulation_boundary` says; or, with `managed_gradient_accumulation` false, the
    one before each call of `step`."""

    def __init__(self, engine: polyreme.Engine, translation: Translation) -> None:
        super().__init__()
        self.polyreme = engine
        self.batch: Batch = translation.batch
        self.micro_steps = 0
        self._stage = translation.stage
        self._boundary: bool | None = None
        self._syncs = True
        self._managed: bool = translation.values["managed_gradient_accumulation"]
        self._stepping = False
        self._backwards = 0  # since the last step

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in one window."""
        return self.batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the coming backward, or the last one before `step`, ends a window."""
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self._stepping
        size = self.batch.accumulation
        return self.micro_steps % size == size - 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide whether the coming backward ends a window, in place of the count of `step` calls. Raises
        OrderError with `managed_gradient_accumulation` false."""
        if not self._managed:
            raise OrderError(
                "set_gradient_accumulation_boundary() beside managed_gradient_accumulation=False, with which "
                "each step() ends a window: leave one of them out"
            )
        self._boundary = bool(is_boundary)

    def in_window(self) -> bool:
        """Return whether a window is under way of which the count of `step` calls says where it ends."""
        counted = self._managed and self._boundary is None
        return counted and self.micro_steps % self.gradient_accumulation_steps() > 0

    def _set_boundary(self) -> None:
        """Tell Polyreme's engine whether the coming backward ends a window, and by what to divide a loss
        whose `backward()` the script itself calls."""
        is_last = self._syncs and self.is_gradient_accumulation_boundary()
        self.polyreme.set_boundary(is_last, extend=True, own=1 / self.gradient_accumulation_steps())

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        """Take no backward in the block for the end of a window."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of the block's backwards on this rank alone; none of them ends a window.
        Raises OrderError at ZeRO stages 2 and 3, and inside of another such block."""
        if self._stage >= 2:
            raise OrderError(
                f"no_sync() at ZeRO stage {self._stage}, which divides gradients between ranks as they are "
                "made: write zero_optimization.stage 0 or 1, or a larger gradient_accumulation_steps"
            )
        if not self._syncs:
            raise OrderError(
                "no_sync() inside of another one, which does it already: leave the inner one out"
            )
        with self._unreduced():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Take the block's backwards for one window: their gradients add up on this rank, and are reduced
        over the ranks where the block ends, after which `step` may be called. Raises UnsupportedError at
        stage 0."""
        if not self._managed:
            raise OrderError(
                "coalesce_grad_reduction() beside managed_gradient_accumulation=False, with which each "
                "step() reduces: leave one of them out"
            )
        if self._stage == 0:
            raise refused("coalesce_grad_reduction at stage 0", "it is of ZeRO 1, 2 and 3", "leave it out")
        if not self._syncs:
            raise OrderError(
                "coalesce_grad_reduction() inside of no_sync(), which reduces nothing: leave that out"
            )
        with self._unreduced():
            yield
        self.polyreme.gradients()

    def _taken(self) -> int:
        """Return how many micro-batches the step had that has just been made."""
        backwards, self._backwards = self._backwards, 0
        return self.gradient_accumulation_steps() if self._managed else backwards
