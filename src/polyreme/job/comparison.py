"""Compares a run with its plan while it runs, once: the memory at the peak of a step, and the seconds that a
step takes.

Invariant: like is compared with like. On CPU ranks the peak of live bytes is recorded in one step, as a dry
run records it; on CUDA it is the allocator's. Communication: one exchange, when it is said."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from polyreme.engine import Engine, StepResult
from polyreme.planner.dry_run import recorded, trace_of
from polyreme.planner.search import binary
from polyreme.step.settings import pipeline_rank

WARM = 1
"""Steps before the one whose memory is measured: optimizer states are made in the first."""
TIMED = 5
"""Steps after it whose median is compared."""
APART = 0.1
"""The part of a prediction by which a measurement may leave it."""


class Comparison:
    """The measurements of a run, whose engine has a resolved config, beside `plan` in it. Nothing is measured
    where there was no plan for as many ranks."""

    def __init__(self, engine: Engine) -> None:
        plan = engine.config.plan
        self._engine, self._plan = engine, plan
        self._left = 0 if plan.ranks != engine.mesh.world_size else WARM + 1 + TIMED
        self._seconds: list[float] = []
        self._memory: dict[str, int] = {}

    def train_step(self, batch: Any) -> StepResult:
        """Make the engine's next step, and measure its memory if that is due."""
        engine, device = self._engine, self._engine.mesh.device
        if self._left != TIMED + 1 or engine.config.compile or not self._plan.memory:
            return engine.train_step(batch)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            result = engine.train_step(batch)
            self._memory = {"in all": torch.cuda.max_memory_allocated(device)}
            return result
        with recorded(engine, batch) as recorder:
            result = engine.train_step(batch)
        row = pipeline_rank(engine.config, engine.mesh).row
        memory = trace_of(recorder, engine, row, result.tokens).memory.by_category
        self._memory = {str(name): size for name, size in memory.items()}
        return result

    def after(self, seconds: float) -> str | None:
        """Note the seconds of a step. Returns, once, what leaves the plan. All ranks must call."""
        if not self._left:
            return None
        self._left -= 1
        if self._left < TIMED:
            self._seconds.append(seconds)
        if self._left:
            return None
        found = self._engine.mesh.gather_objects([median(self._seconds), self._memory])
        memory = max((each for _, each in found), key=lambda each: sum(each.values()))
        return said(self._plan.memory, self._plan.seconds, memory, max(each for each, _ in found))


def said(
    planned: Mapping[Any, int], expected: float | None, memory: Mapping[Any, int], seconds: float
) -> str | None:
    """Say what was measured where it leaves what was planned by more than APART; None where nothing does."""
    lines = []
    peak, most = sum(memory.values()), sum(planned.values())
    if memory and abs(peak - most) > APART * most:
        text = f"a rank has {binary(peak)} at the peak of a step, {_beside(peak, most)} {binary(most)}"
        names = sorted({*planned, *memory}, key=lambda name: -abs(memory.get(name, 0) - planned.get(name, 0)))
        if len(memory) > 1:
            one, other = memory.get(names[0], 0), planned.get(names[0], 0)
            text += f" (most of it {names[0]}: {binary(one)} and {binary(other)})"
        lines.append(text)
    if expected is not None and abs(seconds - expected) > APART * expected:
        text = f"a step takes {seconds:.3g} s, {_beside(seconds, expected)} {expected:.3g} s"
        lines.append(f"{text} (plan.cluster may name a description of this machine)")
    return f"not as planned: {'; '.join(lines)}" if lines else None


def _beside(one: float, other: float) -> str:
    if one >= 2 * other > 0:
        return f"{one / other:.3g} times the plan's"
    return f"{abs(one / other - 1):.0%} {'more' if one > other else 'less'} than the plan's"
