"""DeepSpeed's Lion for GPUs."""

from __future__ import annotations

from typing import Any

from polyreme.optim.groups import Lion


class FusedLion(Lion):
    """Lion. With `set_grad_none` False, `zero_grad` keeps gradients and fills them with zeros."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
