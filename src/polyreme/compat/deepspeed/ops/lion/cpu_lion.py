"""DeepSpeed's Lion for the CPU."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.ops.wide import WideStates
from polyreme.optim.groups import Lion


class DeepSpeedCPULion(WideStates, Lion):
    """Lion. Its momentum is fp32 unless `fp32_optimizer_states` is False."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        Lion.__init__(self, model_params, lr, betas, weight_decay)
