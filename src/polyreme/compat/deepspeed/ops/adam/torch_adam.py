"""torch's fused Adam with DeepSpeed's options.

Invariant: whether weight decay is decoupled (AdamW) is an option of each group, so that an optimizer made of
the same groups is the same."""

from __future__ import annotations

from typing import Any

import torch

from polyreme.compat.deepspeed.refusal import refused


class TorchAdam(torch.optim.Adam):
    """Raises UnsupportedError for AMSGrad, which DeepSpeed does not have either, and for an update without
    bias correction."""

    def __init__(
        self,
        params: Any,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise refused(
                f"{name}(amsgrad=True)", f"{name} does not support the AMSGrad variant", "leave amsgrad out"
            )
        if not bias_correction:
            raise refused(
                f"{name}(bias_correction=False)", "torch's Adam always corrects", "leave bias_correction out"
            )
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=decoupled)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return self.param_groups[0]["decoupled_weight_decay"]
