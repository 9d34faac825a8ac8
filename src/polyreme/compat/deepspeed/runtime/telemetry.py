"""The reports of an engine on its steps that a config can ask for: events for monitors, lines in the log,
times, and the profile of floating-point operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyreme.compat.deepspeed.monitor.config import get_monitor_config
from polyreme.compat.deepspeed.monitor.monitor import MonitorMaster
from polyreme.compat.deepspeed.profiling.flops_profiler import FlopsProfiler
from polyreme.compat.deepspeed.utils.logging import log_dist
from polyreme.compat.deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine

FORWARD, BACKWARD, STEP = "fwd", "bwd", "step"


class Telemetry:
    """The reports of one engine, which calls `timed`, `begin_forward` and `end_step` as it trains."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        given = engine.translation
        self._engine = (engine,)  # in a tuple: an engine is a module
        self.monitor = MonitorMaster(get_monitor_config(given.source))
        self._breakdown = bool(given.values["wall_clock_breakdown"])
        self.timers = SynchronizedWallClockTimer() if self._breakdown else NoopTimer()
        profile = given.section("flops_profiler")
        self._profile_step = int(profile["profile_step"]) if profile["enabled"] else None
        self.profiler: FlopsProfiler | None = None
        if self._profile_step is not None:
            self.profiler = FlopsProfiler(engine.module, engine, profile["recompute_fwd_factor"])
        self._profiling = False

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the time of the block under `name`, if the config has `wall_clock_breakdown`."""
        timer = self.timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def begin_forward(self) -> None:
        """Begin the profile of floating-point operations if the config asks for it at this step."""
        if self.profiler is not None and self._engine[0].global_steps == self._profile_step:
            self.profiler.start_profile()
            self._profiling = True

    def end_step(self) -> None:
        """Print the profile, give the monitors their events and write the log's line, if they are due after
        this step."""
        engine = self._engine[0]
        if self._profiling and self.profiler is not None:
            self._profiling = False
            profile = engine.translation.section("flops_profiler")
            self.profiler.stop_profile()
            if engine.global_rank == 0:
                self.profiler.print_model_profile(
                    profile_step=engine.global_steps,
                    module_depth=profile["module_depth"],
                    top_modules=profile["top_modules"],
                    detailed=profile["detailed"],
                    output_file=profile["output_file"],
                )
            self.profiler.end_profile()
        samples = engine.global_samples
        if self.monitor.enabled and engine.last is not None:
            events = [
                ("Train/Samples/train_loss", engine.last.loss, samples),
                ("Train/Samples/lr", engine.get_lr()[0], samples),
            ]
            if engine.fp16_enabled():
                events.append(("Train/Samples/loss_scale", engine.polyreme.state.loss_scale, samples))
            self.monitor.write_events(events)
        every = engine.steps_per_print()
        if every and engine.global_steps % every == 0:
            log_dist(
                f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
                f"mom={engine.get_mom()}",
                ranks=[0],
            )
            if self._breakdown:
                self.timers.log([FORWARD, BACKWARD, STEP])
