"""DeepSpeed's Adagrad for the CPU."""

from __future__ import annotations

from typing import Any

import torch

from polyreme.compat.deepspeed.ops.wide import HALVES, WideStates
from polyreme.compat.deepspeed.refusal import refused


class DeepSpeedCPUAdagrad(WideStates, torch.optim.Adagrad):
    """torch's Adagrad. Its sum of squares is fp32 unless `fp32_optimizer_states` is False. Raises
    UnsupportedError for AMSGrad, which is no option of Adagrad."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise refused("DeepSpeedCPUAdagrad(amsgrad=True)", "Adagrad has no maximum", "leave amsgrad out")
        self.fp32_optimizer_states = fp32_optimizer_states
        torch.optim.Adagrad.__init__(self, model_params, lr, weight_decay=weight_decay, eps=eps)
        for parameter, state in self.state.items():  # which torch makes at once, in the parameter's dtype
            if fp32_optimizer_states and parameter.dtype in HALVES:
                state["sum"] = state["sum"].float()
