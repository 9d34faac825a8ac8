"""LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020).

No communication: it updates whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """LAMB: the update is Adam's direction plus decay, times the trust ratio: the norm of the parameter over
    that of the direction, clamped to [`min_coeff`, `max_coeff`]; 1 where either is zero. Two states of the
    parameter's size.

    As in DeepSpeed and Apex, `bias_correction` scales the learning rate of a step, not the moments, and so
    also the decay. eps: added to the root of the second moment; with `eps_inside_sqrt` under the root."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff = {min_coeff} and max_coeff = {max_coeff} are no range from 0 on")
        super().__init__(params, defaults)
        self.trust_ratios: list[Tensor] = []
        """The trust ratio of each parameter that the last step updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        self.trust_ratios = [
            self._update(parameter, parameter.grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Update one parameter. Returns its trust ratio."""
        state, (beta1, beta2), eps = self.state[parameter], group["betas"], group["eps"]
        if not state:
            state["step"] = torch.tensor(0.0)  # a constant, whose value is known under fake tensors, too
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean, square, step = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square + eps).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(eps)
        direction = torch.div(mean, root, out=root).add_(parameter, alpha=group["weight_decay"])
        norm, length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(direction)
        ratio = (norm / length).clamp_(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((norm > 0) & (length > 0), ratio, torch.ones_like(ratio))
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        parameter.sub_(direction.mul_(ratio * rate))
        return ratio
