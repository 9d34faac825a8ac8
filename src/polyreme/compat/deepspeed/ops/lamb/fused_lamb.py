"""DeepSpeed's LAMB for GPUs."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.refusal import refused
from polyreme.optim.lamb import Lamb


class FusedLamb(Lamb):
    """LAMB, on any device. Raises UnsupportedError for `amsgrad`, and for `max_grad_norm`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise refused("FusedLamb(amsgrad=True)", "LAMB has no maximum", "leave amsgrad out")
        if max_grad_norm > 0:
            raise refused(
                "FusedLamb(max_grad_norm=...)",
                "an optimizer does not clip",
                "write gradient_clipping in the config",
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt, max_coeff, min_coeff
        )

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step that this optimizer made itself, by parameter."""
        return [ratio.item() for ratio in self.trust_ratios]
