"""Timers of a training loop, of named parts of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import print_dist

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
GIB = 1 << 30

__getattr__ = lazily(__name__)


class _Timer:
    """A timer, with its laps since the last reset. On a GPU it measures the time of the device's work."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._laps: list[tuple[Any, Any]] = []
        self._began: Any = None

    @staticmethod
    def _now() -> Any:
        if get_accelerator().use_host_timers():
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin a lap. Raises OrderError if one is running."""
        if self.started_:
            raise OrderError(f"start() of the timer {self.name_}, which runs: call stop() before")
        self._began, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the lap. Raises OrderError if none is running."""
        if not self.started_:
            raise OrderError(f"stop() of the timer {self.name_}, which does not run: call start() before")
        self._laps.append((self._began, self._now()))
        self.started_ = False

    def reset(self) -> None:
        """Forget all laps."""
        self.started_ = False
        self._laps.clear()

    def _milliseconds(self) -> list[float]:
        if not self._laps or isinstance(self._laps[0][0], float):
            return [(ended - began) * 1000 for began, ended in self._laps]
        self._laps[-1][1].synchronize()
        return [began.elapsed_time(ended) for began, ended in self._laps]

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds of all laps, with what has passed of one that is running. `reset` forgets
        them."""
        if self.started_:  # the lap so far counts as one, and the rest of it as another
            self.stop()
            self.start()
        laps = self._milliseconds()
        if reset:
            self._laps.clear()
        return sum(laps)

    def mean(self) -> float:
        """Return the milliseconds of a lap, without the shortest and longest tenth."""
        return trim_mean(self._milliseconds(), 0.1)


class SynchronizedWallClockTimer:
    """A collection of timers by name, each of which is made when it is first asked for."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """Return the device's memory, in words."""
        asked = ("memory_allocated", "max_memory_allocated", "memory_cached", "max_memory_cached")
        sizes = {name: getattr(get_accelerator(), name)() for name in asked}
        return "".join(f" | {name}: {size / GIB:.4f} GB" for name, size in sizes.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of these timers, divided by `normalizer`, and with `memory_breakdown` the
        device's memory, on these ranks (by default the first)."""
        _require_above_zero("normalizer", normalizer)
        shares = {name: timer.elapsed(reset) / normalizer for name, timer in self._named(names)}
        text = "time (ms)" + "".join(f" | {name}: {share:.2f}" for name, share in shares.items())
        print_dist(text + (self.memory_usage() if memory_breakdown else ""), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return a thousand times the mean lap of these timers over `normalizer`. As in DeepSpeed, laps stay
        whatever `reset` says: `log` and `elapsed` take them away."""
        _require_above_zero("normalizer", normalizer)
        return {name: timer.mean() * 1000 / normalizer for name, timer in self._named(names)}

    def _named(self, names: Sequence[str]) -> list[tuple[str, _Timer]]:
        """Return those of these timers that there are."""
        return [(name, self.timers[name]) for name in names if name in self.timers]


def _require_above_zero(name: str, value: float) -> None:
    if value <= 0:
        raise ArgumentError(f"{name}={value}: give a number above 0")


class NoopTimer:
    """A stand-in for `SynchronizedWallClockTimer` whose timers measure nothing."""

    class Timer:
        """A timer whose calls do nothing."""

        start = reset = stop = staticmethod(lambda *args, **kwargs: None)
        elapsed = mean = staticmethod(lambda *args, **kwargs: 0)

    timer = Timer()
    log = get_mean = timer.start

    def __call__(self, name: str) -> Any:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of `data` without this part of it at either end; 0 of nothing. Raises ArgumentError for
    a part outside 0 to 1."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ArgumentError(f"trim_percent={trim_percent}: give the part as a number from 0 to 1")
    cut = round(len(data) * trim_percent)
    left = sorted(data)[cut : len(data) - cut]
    return sum(left) / len(left) if left else 0.0
