"""DeepSpeed's Adam for the CPU."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.ops.adam.torch_adam import TorchAdam
from polyreme.compat.deepspeed.ops.wide import WideStates


class DeepSpeedCPUAdam(WideStates, TorchAdam):
    """Adam or (`adamw_mode`) AdamW. Momentum and variance are fp32 unless `fp32_optimizer_states` is
    False."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        TorchAdam.__init__(
            self, model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode
        )
