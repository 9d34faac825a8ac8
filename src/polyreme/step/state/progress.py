"""The progress of training, and the learning rate and loss scale that follow from it.

Communication: none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polyreme.config import Progress
from polyreme.errors import BatchError, ModelError
from polyreme.optim.options import Options
from polyreme.step.precision import LossScale


@dataclass
class TrainingState:
    """The progress of training."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    lr: float = 0.0
    loss_scale: float = 1.0

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise ModelError(
                f"engine.state.{name} = {value!r}: engine.state tells of the training, and changes nothing. "
                "The learning rate is set by optimizer.lr and lr_schedule of the config or by the "
                "lr_scheduler of initialize, how far training has come by engine.load"
            )
        super().__setattr__(name, value)

    def change(self, **values: float) -> None:
        """Set values. For TrainingProgress alone, as scripts may not."""
        self.__dict__.update(values)

    @property
    def progress(self) -> Progress:
        """Steps, samples and tokens."""
        return Progress(self.step, self.samples, self.tokens)


class TrainingProgress:
    """Advances with each step.

    `options` has the options of the optimizer's groups, `scale` the loss scale. Steps that left the weights
    alone count in `state`, but not for the learning rate schedule, as with torch's."""

    def __init__(self, options: Options, scale: LossScale) -> None:
        self.options, self.scale = options, scale
        self.state = TrainingState(lr=options.lr, loss_scale=scale.value)
        self._skipped = Progress(0, 0, 0)

    def check_tokens(self, tokens: float) -> None:
        """Raise BatchError for a step without tokens where the schedule is measured in them."""
        if self.options.needs_tokens and not tokens:
            raise BatchError(
                "the learning rate schedule is measured in tokens, "
                "but the batches carry no tokens (`input_ids`): "
                "give lr_schedule.total and lr_schedule.warmup (or train.length) in steps or samples"
            )

    def advance(self, samples: int, tokens: int, skipped: bool) -> None:
        """Count one step of all ranks, and set the learning rate and the loss scale of the next one."""
        before = self.state
        step = Progress(1, samples, tokens)
        self.state.change(
            step=before.step + 1, samples=before.samples + samples, tokens=before.tokens + tokens
        )
        if skipped:
            self._skipped = Progress(*map(sum, zip(self._skipped, step, strict=True)))
            self.options.skip()
        else:
            self.options.advance(self._scheduled())
        self.state.change(lr=self.options.lr, loss_scale=self.scale.value)

    def observe(self, metric: float) -> float:
        """Step ReduceLROnPlateau by `metric`, the same on all ranks. Returns the new learning rate."""
        self.options.observe(metric)
        self.state.change(lr=self.options.lr)
        return self.state.lr

    def counts(self) -> dict[str, float]:
        """Return what is the same on all ranks, beside the options of the optimizer."""
        return {key: count for key, count in asdict(self.state).items() if key != "lr"}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, as JSON can hold it."""
        return {
            **asdict(self.state),
            "good_steps": self.scale.good_steps,
            "overflows": self.scale.overflows,
            "options": self.options.state_dict(),
            "skipped": self._skipped._asdict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the result of `state_dict`. Returns notes on the optimizer's options, for the user."""
        self.state.change(**{key: int(state[key]) for key in ("step", "samples", "tokens")})
        self._skipped = Progress(**state.get("skipped", {}))
        notes = self.options.load_state_dict(state["options"], self._scheduled())
        if self.scale.dynamic:
            self.scale.value, self.scale.good_steps = float(state["loss_scale"]), int(state["good_steps"])
            self.scale.overflows = int(state.get("overflows", 0))
        self.state.change(lr=self.options.lr, loss_scale=self.scale.value)
        return notes

    def _scheduled(self) -> Progress:
        """Return how far the learning rate schedule has come."""
        done, skipped = self.state.progress, self._skipped
        return Progress(*(a - b for a, b in zip(done, skipped, strict=True)))
