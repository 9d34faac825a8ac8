"""fp32 master weights by hand, for the systems that have none of their own.

Invariant: after `write_back`, each parameter is its master rounded to the parameter's dtype.
"""

from __future__ import annotations

import torch
from torch import nn


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient, which every parameter of the models here has after a backward."""
    if tensor.grad is None:
        raise RuntimeError(f"a parameter of shape {tuple(tensor.shape)} got no gradient")
    return tensor.grad


class Masters:
    """The fp32 weights that the optimizer sees, and the casts between them and a model that computes in
    `dtype`.

    In fp32 the model's parameters are the masters and both casts are nothing. Buffers keep their dtype: a
    rotary frequency in bf16 would be another model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.params: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.split = dtype != torch.float32
        self.weights: list[torch.Tensor] = list(self.params)
        if self.split:
            self.weights = [p.detach().clone().requires_grad_() for p in self.params]
            for p, weight in zip(self.params, self.weights, strict=True):
                p.data = p.data.to(dtype)
                weight.grad = torch.empty_like(weight)

    def read_grads(self) -> None:
        """Puts the parameters' gradients, in fp32, where the optimizer looks for them."""
        if self.split:
            torch._foreach_copy_([grad_of(w) for w in self.weights], [grad_of(p) for p in self.params])

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the updated masters into the parameters and drops the gradients."""
        if self.split:
            torch._foreach_copy_(self.params, self.weights)
        for p in self.params:
            p.grad = None
