"""DeepSpeed's Adam for GPUs."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.ops.adam.torch_adam import TorchAdam


class FusedAdam(TorchAdam):
    """Adam or (`adam_w_mode`) AdamW. With `set_grad_none` False, `zero_grad` keeps gradients and fills them
    with zeros."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
