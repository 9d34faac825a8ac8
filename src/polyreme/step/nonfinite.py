"""The treatment of steps with a NaN or Inf in loss or gradients: training ends, or the step is skipped, or
made all the same.

Communication: none; the totals that show one are the same on all ranks."""

from __future__ import annotations

from polyreme.config.schema import PrecisionSection
from polyreme.errors import NumericsError, warn
from polyreme.step.state.progress import TrainingProgress
from polyreme.step.totals import Totals


class NonFinite:
    """Decides by the loss scale, or without a dynamic one by `precision.on_nonfinite`."""

    def __init__(self, precision: PrecisionSection, progress: TrainingProgress, warns: bool) -> None:
        """warns: whether this rank warns of the first step that on_nonfinite skips or makes."""
        self._precision, self._progress, self._warns = precision, progress, warns

    def skips(self, totals: Totals) -> bool:
        """Return whether the step of `totals` leaves the weights alone. Raises NumericsError where it ends
        training; nothing is updated then."""
        if totals.is_finite or not totals.weight:
            return False
        scale, on_nonfinite = self._progress.scale, self._precision.on_nonfinite
        step = f"step {self._progress.state.step + 1}"
        if self._precision.on_min_scale == "error" and scale.is_least:
            raise NumericsError(
                f"{step}: an overflow, and the loss scale is at its minimum, {self._precision.min_scale:g}: "
                "check the data and the learning rate, or compute in bf16"
            )
        if scale.dynamic:
            return True
        what = f"{step}: the loss or a gradient is NaN or Inf (the loss is {totals.mean_loss:g})"
        if on_nonfinite == "error":
            raise NumericsError(what)
        if self._warns:
            self._warns = False
            done = {"skip": "the step is skipped", "apply": "the step is made all the same"}[on_nonfinite]
            warn(f"{what}: {done}, as will be later ones, without a word")
        return on_nonfinite == "skip"
