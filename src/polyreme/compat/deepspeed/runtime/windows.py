"""The windows of micro-batches of DeepSpeed's engine, each of which is a step: where they end, and what of
them is reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

import polyreme
from polyreme.compat.deepspeed.json_config import Batch, Translation
from polyreme.compat.deepspeed.refusal import OrderError, refused


class Windows(nn.Module):
    """Tells `polyreme` which backward is the last of a window: by the count of `step` calls, by what the
    script says, or, with `managed_gradient_accumulation` false, where `step` is called."""

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
        """Micro-batches of one window."""
        return self.batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming backward, or the last one before `step`, ends a window."""
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self._stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming backward ends a window, instead of the count of `step` calls."""
        if not self._managed:
            raise OrderError(
                "set_gradient_accumulation_boundary() is not supported with "
                "managed_gradient_accumulation=False, where each step() ends a window: leave it out"
            )
        self._boundary = bool(is_boundary)

    def in_window(self) -> bool:
        """Whether a window that the count of `step` calls ends has begun, and has not ended."""
        counted = self._managed and self._boundary is None
        return counted and self.micro_steps % self.gradient_accumulation_steps() > 0

    def _set_boundary(self) -> None:
        """Say what the coming backward is; one of the script's own is divided as `backward` divides."""
        is_last = self._syncs and self.is_gradient_accumulation_boundary()
        self.polyreme.set_boundary(is_last, extend=True, own=1 / self.gradient_accumulation_steps())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add gradients up on this rank, and do not end a window."""
        if self._stage >= 2:
            raise OrderError(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
                f"{self._stage}: set zero_optimization.stage to 0 or 1"
            )
        if not self._syncs:
            raise OrderError("no_sync context manager reentry is unsupported: leave the inner one out")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside are one window: their gradients add up on this rank, and are reduced at the end,
        where `step` may come. At stages 1 to 3."""
        if not self._managed:
            raise OrderError(
                "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False, where "
                "each step() reduces: leave it out"
            )
        if self._stage == 0:
            raise refused("coalesce_grad_reduction at stage 0", "it is of ZeRO 1, 2 and 3", "leave it out")
        if not self._syncs:
            raise OrderError("coalesce_grad_reduction cannot be inside of no_sync: leave that out")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True
        self.polyreme.gradients()

    def _taken(self) -> int:
        """How many micro-batches the step has that was made now."""
        backwards, self._backwards = self._backwards, 0
        return self.gradient_accumulation_steps() if self._managed else backwards
