"""Number formats, the loss scale, the sums behind norm, overflow and loss, and the search for the module that made a NaN.

Invariant: the squared norm of a shard is summed in rows of ALIGN elements that never straddle two tensors, then in float64, so
that it does not depend on how tensors are laid out in buckets and shards (to the precision of a float32 norm).
Communication: one all-reduce of four float64 numbers a step carries norm, overflow, loss and weight together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.layout import ALIGN

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """What the optimizer updates: float32, or float64 where the model computes in it."""
    return torch.float64 if compute == torch.float64 else torch.float32


@dataclass
class LossScale:
    """The factor on the loss that keeps small fp16 gradients from vanishing (Micikevicius et al., 2018).

    Dynamic: after `interval` good steps it grows by `growth`; after an overflow it shrinks by `backoff`, not below `minimum`.
    Static (dynamic=False): it stays. All values powers of two keep scaling exact.
    """

    value: float = 1.0
    dynamic: bool = False
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Take note of one step that did or did not overflow."""
        if not self.dynamic:
            return
        if overflow:
            self.value, self.good_steps = max(self.value * self.backoff, self.minimum), 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = self.value * self.growth, 0


def squared_norm(flat: Tensor) -> Tensor:
    """Sum of squares of a flat tensor whose size is a multiple of ALIGN: a float64 scalar, not finite if any element is not."""
    rows = torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1)
    return rows.double().square_().sum()


def clip_factor(norm: float, limit: float | None) -> float:
    """What to multiply gradients of global norm `norm` by so that it is at most `limit`, as torch's clip_grad_norm_ does."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def norm_of(squares: float, factor: float, dtype: torch.dtype) -> float:
    """sqrt(squares) * factor in the master's `dtype`: rounded to float32, the norm no longer depends on the order of the sum."""
    norm = math.sqrt(squares) * factor if math.isfinite(squares) else math.inf
    return torch.tensor(norm, dtype=dtype).item()


def cast_floating(value: object, dtype: torch.dtype, device: torch.device | None = None) -> object:
    """`value` with every floating tensor in it in `dtype` and every tensor on `device`; other things as they are."""

    def cast(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return pytree.tree_map(cast, value)


@contextmanager
def watch_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """While open, notes in the yielded list what first makes a NaN or an Inf: a module from finite inputs in forward,
    or a module's backward from finite output gradients. Slow: for the diagnosis of a step that failed."""
    found: list[str] = []

    def forward(name: str, module: nn.Module) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def check(_: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            if not found and not _finite(output) and _finite(inputs):
                weights = "" if _finite(list(module.parameters(recurse=False))) else "; its parameters are not finite"
                found.append(f"the forward of {name or 'the model'} ({type(module).__name__}) from finite inputs{weights}")

        return check

    def backward(name: str, module: nn.Module) -> Callable[[nn.Module, object, object], None]:
        def check(_: nn.Module, grad_input: object, grad_output: object) -> None:
            if not found and not _finite(grad_input) and _finite(grad_output):
                found.append(f"the backward of {name or 'the model'} ({type(module).__name__}) from finite output gradients")

        return check

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(forward(name, module)))
        if not any(True for _ in module.children()):
            handles.append(module.register_full_backward_hook(backward(name, module)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _finite(value: object) -> bool:
    leaves: Iterable[object] = pytree.tree_leaves(value)
    return all(bool(torch.isfinite(t).all()) for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
