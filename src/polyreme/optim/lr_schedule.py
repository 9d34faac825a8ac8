"""The learning rate over time, as a fraction of its highest value.

Invariant: the factor depends only on the progress of training (steps, samples, tokens), so a schedule in
samples or tokens is the same curve for any number of ranks and any batch size. It is at most 1, reaches 1
when the warm-up ends, changes without jumps, and keeps its last value after the end. Pure."""

from __future__ import annotations

import math

from polyreme.config import Duration, LRScheduleSection, Progress
from polyreme.errors import ConfigError, Problem


class LRSchedule:
    """A warm-up, followed by one of: constant, linear, cosine (arXiv:1608.03983, one period), wsd (warm-up,
    stable, decay: arXiv:2404.06395, with a linear decay) and one-cycle (arXiv:1708.07120).

    The warm-up, the whole schedule and wsd's decay may each be in their own unit. A length in another unit
    than the schedule's is converted at the rate seen so far (such as tokens per step), which is exact for
    equal steps. Raises ConfigError where the section's total length is not resolved yet."""

    def __init__(self, section: LRScheduleSection) -> None:
        if isinstance(section.total, str):
            fix = "use the section of a config after resolve(world_size), or write a duration"
            raise ConfigError(
                [Problem("lr_schedule.total", section.total, "the length is not known yet", fix)]
            )
        self.section = section
        self.total: Duration = section.total
        self.decay: Duration = section.decay or self.total.scaled(0.1)

    @property
    def is_constant(self) -> bool:
        """Whether the factor is 1 from the first step on."""
        return self.section.name == "constant" and not self.section.warmup.amount

    @property
    def in_tokens(self) -> bool:
        """Whether any length that affects the factor is in tokens."""
        durations = [
            self.section.warmup,
            *([] if self.section.name == "constant" else [self.total, self.decay]),
        ]
        return any(duration.amount and duration.unit == "tokens" for duration in durations)

    def factor(self, progress: Progress) -> float:
        """Return the fraction, in [0, 1], of the highest learning rate for the step that follows
        `progress`."""
        section = self.section
        done = section.warmup.count(progress)
        if done < section.warmup.amount:
            rise = done / section.warmup.amount
            if section.name == "one-cycle":
                rise = (1 - math.cos(math.pi * rise)) / 2
            return section.start + (1 - section.start) * rise
        if section.name == "constant":
            return 1.0
        fall = self._fall(progress)
        if section.name in ("cosine", "one-cycle"):
            fall = (1 - math.cos(math.pi * fall)) / 2
        return 1 - (1 - section.final) * fall

    def _fall(self, progress: Progress) -> float:
        """The fraction of the falling phase that is done, in [0, 1]."""
        if self.section.name == "wsd":
            begin = self.total.amount - self._length(self.decay, progress)
        else:
            begin = self._length(self.section.warmup, progress)
        done = self.total.count(progress)
        if done >= self.total.amount:
            return 1.0
        return max(0.0, (done - begin) / (self.total.amount - begin)) if done > begin else 0.0

    def _length(self, duration: Duration, progress: Progress) -> float:
        """`duration` in the unit of the whole schedule; 0 while its own unit was not counted yet."""
        if duration.unit == self.total.unit:
            return duration.amount
        counted = duration.count(progress)
        return duration.amount * self.total.count(progress) / counted if counted else 0.0
