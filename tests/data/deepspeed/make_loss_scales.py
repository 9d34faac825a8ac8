"""Makes loss_scales.json beside it with a real DeepSpeed, on the CPU: `python
tests/data/deepspeed/make_loss_scales.py` (it needs what requirements-bench.lock has). A row has which of its
steps overflow ("x"), and log2 of the loss scale after each, or "raises" at the last one. Stage 1 stands for
all that ZeRO has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

FIRST, STEPS = 6, 32


def of_zero(window: int, hysteresis: int, consecutive: bool) -> tuple[Callable[[bool], None], Any, str]:
    made = loss_scaler.DynamicLossScaler(2**FIRST, window, 1, hysteresis, consecutive, dtype=torch.half)
    return made.update_scale, made, "cur_scale"


def without_zero(window: int) -> tuple[Callable[[bool], None], Any, str]:
    arguments = {
        loss_scaler.INITIAL_LOSS_SCALE: 2**FIRST,
        loss_scaler.SCALE_WINDOW: window,
        loss_scaler.MIN_LOSS_SCALE: 1,
    }
    config = loss_scaler.LossScaleConfig(torch.half, True, 0, arguments)
    wrapper = SimpleNamespace(verbose=False, loss_scale_config=config)
    return lambda overflow: FP16_Optimizer._update_scale(wrapper, overflow), config, "cur_scale"


def follow(update: Callable[[bool], None], holder: Any, name: str, steps: str) -> list[int | str]:
    found: list[int | str] = []
    for step in steps:
        try:
            update(step == "x")
        except Exception:
            return [*found, "raises"]
        found.append(int(getattr(holder, name)).bit_length() - 1)
    return found


def main() -> None:
    loss_scaler.dist.get_rank = lambda: 1  # which logs nothing
    draw, rows = random.Random(0), []
    for window in (1, 2, 3, 5):
        cases = [(1, count, again) for count in (1, 2, 3) for again in (False, True)] + [(0, 2, False)]
        for stage, count, again in cases:
            made = of_zero(window, count, again) if stage else without_zero(window)
            steps = "".join("x" if draw.random() < (0.1 + 0.3 * again) else "." for _ in range(STEPS))
            row = {"stage": stage, "window": window, "hysteresis": count, "consecutive": again}
            rows.append({**row, "steps": steps, "exponents": follow(*made, steps)})
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = f'{{"first": {FIRST}, "rows": [\n  {lines}\n]}}\n'
    Path(__file__).with_name("loss_scales.json").write_text(text)


main()
