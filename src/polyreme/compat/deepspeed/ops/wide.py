"""Updates of half-precision parameters in single precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def widened(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Half-precision parameters and their gradients are fp32 inside, and as before after it, with what was
    computed rounded to their own precision."""
    before = [(each, each.data, each.grad) for each in parameters if each.dtype in HALVES]
    for each, data, grad in before:
        each.grad = None  # which may not be of another dtype than its parameter
        each.data = data.float()
        each.grad = None if grad is None else grad.float()
    try:
        yield
    finally:
        for each, data, grad in before:
            each.grad = None
            data.copy_(each.data)
            each.data = data
            each.grad = grad


class WideStates(Optimizer):
    """An optimizer whose states are fp32 whatever its parameters are, unless `fp32_optimizer_states` is
    False; it updates in fp32 then, too."""

    fp32_optimizer_states = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        with widened(every if self.fp32_optimizer_states else ()):
            super().step()
        return loss
