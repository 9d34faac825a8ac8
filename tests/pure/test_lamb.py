"""LAMB beside its formula, number by number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from polyreme.compat.deepspeed.ops.lamb import FusedLamb
from polyreme.config import Config
from polyreme.optim.lamb import Lamb


def formula(
    weights: list[float], gradients: list[list[float]], lr: float, decay: float, **how: Any
) -> tuple[list[float], float]:
    """The weights after these gradients, and the last trust ratio."""
    beta1, beta2, eps, ratio = 0.8, 0.9, 1e-3, 1.0
    mean, square = [0.0] * len(weights), [0.0] * len(weights)
    for step, gradient in enumerate(gradients, 1):
        mean = [beta1 * m + (1 - beta1) * g for m, g in zip(mean, gradient, strict=True)]
        square = [beta2 * v + (1 - beta2) * g * g for v, g in zip(square, gradient, strict=True)]
        root = [math.sqrt(v + eps) if how["eps_inside_sqrt"] else math.sqrt(v) + eps for v in square]
        direction = [m / r + decay * w for m, r, w in zip(mean, root, weights, strict=True)]
        norm, length = math.hypot(*weights), math.hypot(*direction)
        ratio = min(max(norm / length, how["min_coeff"]), how["max_coeff"]) if norm and length else 1.0
        rate = lr
        if how["bias_correction"]:
            rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weights = [w - rate * ratio * d for w, d in zip(weights, direction, strict=True)]
    return weights, ratio


@pytest.mark.parametrize("weights", [[3.0, -4.0, 0.5], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize(
    "how",
    [
        {"bias_correction": True, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01},
        {"bias_correction": False, "eps_inside_sqrt": True, "max_coeff": 2.0, "min_coeff": 0.01},
        {"bias_correction": True, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 5.0},
    ],
)
def test_an_update_is_the_formulas(weights: list[float], how: dict[str, Any]) -> None:
    gradients = [[0.1, -2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 1.0, -0.2], [0.1, 0.1, 0.1]]
    wanted, ratio = formula(weights, gradients, 0.1, 0.05, **how)
    parameter = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    optimizer = FusedLamb([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.05, **how)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    assert parameter.tolist() == pytest.approx(wanted, rel=1e-12)
    assert optimizer.get_lamb_coeffs() == [pytest.approx(ratio, rel=1e-12)]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="no range"):
        Lamb([torch.zeros(1)], min_coeff=2.0, max_coeff=1.0)
    config = {"optimizer": {"name": "LAMB", "options": {"max_coef": 1.0}}}
    (problem,) = Config.load(config).problems(1)
    assert problem.key == "optimizer.options" and "max_coeff" in problem.fix
