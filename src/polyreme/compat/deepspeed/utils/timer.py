"""Timers of a training loop: of named parts of a step, and of samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import logger, print_dist

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6
GIB = 1 << 30


class CudaEventTimer:
    """The time between two events of a device."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event, self.end_event = start_event, end_event

    def get_elapsed_msec(self) -> float:
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)


class _HostTimer:
    """The time between two moments of this process."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end

    def get_elapsed_msec(self) -> float:
        return (self.end - self.start) * 1000.0


class _Timer:
    """One timer: its laps since the last reset."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self.use_host_timer = get_accelerator().use_host_timers()
        self.event_timers: list[CudaEventTimer | _HostTimer] = []
        self.elapsed_records: list[float] | None = None
        self._began: Any = None

    def _now(self) -> Any:
        if self.use_host_timer:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin a lap. Raises OrderError in one."""
        if self.started_:
            raise OrderError(f"{self.name_} timer has already been started: stop it first")
        self._began, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End a lap. Raises OrderError outside one."""
        if not self.started_:
            raise OrderError(f"{self.name_} timer is not started: start it first")
        lap = _HostTimer if self.use_host_timer else CudaEventTimer
        self.event_timers.append(lap(self._began, self._now()))
        self.started_ = False

    def reset(self) -> None:
        """Forget all laps."""
        self.started_, self.elapsed_records = False, None
        self.event_timers.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all laps; a lap that runs ends, and another one begins."""
        if running := self.started_:
            self.stop()
        self.elapsed_records = [lap.get_elapsed_msec() for lap in self.event_timers]
        total = sum(self.elapsed_records)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of a lap, without the shortest and longest tenth."""
        self.elapsed(reset=False)
        return trim_mean(self.elapsed_records or (), 0.1)


class SynchronizedWallClockTimer:
    """Timers by name; on a GPU they measure its own work."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    def __call__(self, name: str) -> _Timer:
        if name not in self.timers:
            self.timers[name] = self.Timer(name)
        return self.timers[name]

    @staticmethod
    def memory_usage() -> str:
        """The device's memory, in words."""
        device = get_accelerator()
        figures = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {size / GIB:.4f} GB" for name, size in figures.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the times of these timers, divided by `normalizer`, on these ranks (by default the first)."""
        shares = [(name, self.timers[name].elapsed(reset=reset) / _above_zero(normalizer))
                  for name in names if name in self.timers]  # fmt: skip
        text = "time (ms)" + "".join(f" | {name}: {share:.2f}" for name, share in shares)
        print_dist(text + (self.memory_usage() if memory_breakdown else ""), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """A thousand times the mean lap of these timers over `normalizer`. As in DeepSpeed, laps stay
        whatever `reset` says: `log` and `elapsed` take them away."""
        scale = 1000.0 / _above_zero(normalizer)
        return {name: self.timers[name].mean() * scale for name in names if name in self.timers}


def _above_zero(normalizer: float) -> float:
    if normalizer <= 0:
        raise ArgumentError(f"normalizer must be above 0, got {normalizer}")
    return normalizer


class _NoopTimer:
    def start(self) -> None:
        return None

    def reset(self) -> None:
        return None

    def stop(self, **kwargs: Any) -> None:
        return None

    def elapsed(self, **kwargs: Any) -> float:
        return 0

    def mean(self) -> float:
        return 0


class NoopTimer:
    """Timers that measure nothing."""

    Timer = _NoopTimer

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> _NoopTimer:
        return self.timer

    def get_timers(self) -> dict[str, _NoopTimer]:
        return {}

    def log(self, names: Sequence[str], *args: Any, **kwargs: Any) -> None:
        return None

    def get_mean(self, names: Sequence[str], *args: Any, **kwargs: Any) -> None:
        return None


class ThroughputTimer:
    """Samples per second, from the step `start_step` on; reported every `steps_per_output` steps.

    `config` has `enabled` and `synchronized`; `batch_size` is that of a step."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.start_time = self.end_time = self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started = self.initialized = False

    def update_epoch_count(self) -> None:
        """Begin another epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.time()

    def start(self) -> None:
        """Begin a micro-step."""
        if self.config.enabled:
            self.started = self.initialized = True
            if self.global_step_count >= self.start_step:
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step, and with `global_step` a step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time <= 0:
            return
        self.end_time = self._now()
        self.total_elapsed_time += self.end_time - self.start_time
        self.step_elapsed_time += self.end_time - self.start_time
        if global_step:
            every = self.steps_per_output
            if report_speed and every is not None and self.global_step_count % every == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def _report(self) -> None:
        device = get_accelerator()
        micro, step = self.micro_step_count, self.global_step_count
        at = f"epoch={self.epoch_count}/micro_step={micro}/global_step={step}"
        self.logging(
            f"{at}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + TIME_EPSILON)}, "
            f"MemAllocated={round(device.memory_allocated() / GIB, 2)}GB, "
            f"MaxMemAllocated={round(device.max_memory_allocated() / GIB, 2)}GB"
        )
        if self.monitor_memory:
            self.logging(f"{at}, available: {round(device.available_memory() / GIB, 2)}GB")

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all steps that were measured; minus infinity before there are any."""
        measured = self.global_step_count - self.start_step
        if measured <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size / (self.total_elapsed_time / measured)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean of `data` without this part of it at either end; 0 of nothing. Raises ArgumentError for a part
    outside 0 to 1."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ArgumentError(f"trim_percent must be between 0 and 1, got {trim_percent}")
    cut = round(len(data) * trim_percent)
    left = sorted(data)[cut : len(data) - cut]
    return sum(left) / len(left) if left else 0.0
