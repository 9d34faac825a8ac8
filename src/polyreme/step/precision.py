"""Number formats, the loss scale, the norm of gradients, and the search for the module that made a NaN.

Invariant: the squared norm of a shard is summed in rows of ALIGN elements that never straddle two tensors,
then in float64, so that it does not depend on how tensors are laid out in buckets and shards (to the
precision of a float32 norm).
Communication: none; one all-reduce of float64 totals a step carries norm, overflow, loss and weight
together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.config.repair import FORMATS
from polyreme.config.schema import SCALED, PrecisionSection
from polyreme.errors import warn
from polyreme.models.huggingface import map_leaves, tensors_in

GRADIENT, MODEL = "the gradient of the parameter", "the forward of the model ("
"""Names of a gradient and of the whole model's forward in the findings of `watch_nonfinite`."""
AUTOCAST = {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.float16}
"""The dtype of torch.autocast, by precision.compute."""
DTYPES = {
    **dict.fromkeys(AUTOCAST, torch.float32),
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def autocast(compute: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward and its loss: torch.autocast where the config asks for it."""
    return torch.autocast(device.type, AUTOCAST[compute]) if compute in AUTOCAST else nullcontext()


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """Return the dtype that the optimizer updates: float32, or float64 where the model computes in it."""
    return torch.float64 if compute == torch.float64 else torch.float32


def warn_of_default(module: nn.Module, compute: str) -> None:
    """Warn where trained parameters were made in another format than `compute`, which nobody asked for."""
    trained = {p.dtype for p in module.parameters() if p.requires_grad and p.is_floating_point()}
    if others := sorted(str(dtype).removeprefix("torch.") for dtype in trained - {DTYPES[compute]}):
        values = [f'"{FORMATS[each]}"' for each in others if each in FORMATS]
        warn(
            f"the model was made in {', '.join(others)} and is trained in {compute}, the default of "
            f'precision.compute: write precision.compute = {", ".join(values)}, or "{compute}" to keep it so'
        )


@dataclass
class LossScale:
    """The factor on the loss that keeps small fp16 gradients from vanishing (Micikevicius et al., 2018).

    Dynamic: after `interval` good steps it grows by `growth`. After `hysteresis` overflows, and at each
    further one, it shrinks by `backoff`, not below `minimum`. A growth resets the count of overflows, and so
    does a good step if `forgets`. The first growth, and the first after an overflow, take `delay` more good
    steps. Static (dynamic=False): it stays. Scaling is exact where all values are powers of two."""

    value: float = 1.0
    dynamic: bool = False
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0
    hysteresis: int = 1
    forgets: bool = False
    delay: int = 0
    good_steps: int = field(init=False)
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.good_steps = -self.delay

    @property
    def is_least(self) -> bool:
        """True if the next overflow should shrink the scale and cannot."""
        return self.dynamic and self.overflows + 1 >= self.hysteresis and self.value == self.minimum

    def update(self, overflow: bool) -> None:
        """Count one step, with or without overflow."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps, self.overflows = -self.delay, self.overflows + 1
            if self.overflows >= self.hysteresis:
                self.value = max(self.value * self.backoff, self.minimum)
            return
        self.good_steps += 1
        if self.forgets:
            self.overflows = 0
        if self.good_steps == self.interval:
            self.value, self.good_steps, self.overflows = self.value * self.growth, 0, 0


def loss_scale(section: PrecisionSection) -> LossScale:
    """Return the loss scale of the config's section: 1 unless it computes in fp16."""
    if section.compute not in SCALED or section.loss_scale is None:
        return LossScale()
    dynamic = section.loss_scale == "dynamic"
    first = section.initial_scale if section.loss_scale == "dynamic" else section.loss_scale
    return LossScale(
        first,
        dynamic,
        section.growth,
        section.backoff,
        section.growth_interval,
        section.min_scale,
        section.hysteresis,
        section.consecutive_hysteresis,
        section.growth_delay,
    )


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor that brings gradients of global norm `norm` to at most `limit`, as in torch's
    clip_grad_norm_."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def norm_of(squares: float, factor: float, dtype: torch.dtype) -> float:
    """Return sqrt(squares) * factor in the master's `dtype`: rounded to float32, the norm does not depend on
    the order of the sum."""
    norm = math.sqrt(squares) * factor if math.isfinite(squares) else math.inf
    return torch.tensor(norm, dtype=dtype).item()


def cast_floating(value: object, dtype: torch.dtype | None, device: torch.device | None = None) -> object:
    """Return `value`, any nesting of containers and dataclasses, with floating tensors in `dtype` and all
    tensors on `device` (None: as they are). Other objects with a `to`, such as batches of graphs, are moved
    too."""

    def cast(leaf: Any) -> object:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if device is not None and callable(getattr(leaf, "to", None)) else leaf
        wanted = dtype if leaf.is_floating_point() else None
        moved = leaf.to(
            device=device, dtype=wanted, non_blocking=device is not None and device.type == "cuda"
        )
        # autograd saves no inference tensors
        return moved.clone() if moved.is_inference() and not torch.is_inference_mode_enabled() else moved

    return map_leaves(cast, value)


@contextmanager
def watch_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """Find the first NaN or Inf while open, and put it into the yielded list: a module from finite inputs in
    forward, a module's backward from finite output gradients, or the gradient of a parameter. Slow: for the
    diagnosis of a failed step."""
    found: list[str] = []

    def note(what: str) -> None:
        if not found:
            found.append(what)

    def forward(name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any, object], None]:
        title = f"{name or 'the model'} ({type(module).__name__})"
        leaf = not any(True for _ in module.children())

        def check(_: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            inputs = (args, kwargs)
            if not _finite(output):
                if _finite(inputs):
                    # the others are released already
                    held = [p for p in module.parameters(recurse=False) if p.untyped_storage().nbytes()]
                    note(
                        f"the forward of {title} from finite inputs"
                        + ("" if _finite(held) else "; its parameters are not finite")
                    )
            elif leaf and torch.is_grad_enabled():
                backward(title, inputs, output)

        return check

    def backward(title: str, inputs: object, output: object) -> None:
        """Hook the tensors, as torch's module hooks wrap outputs and so forbid models to change them in
        place."""
        healthy: list[bool] = []
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: healthy.append(_finite(gradient)))
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient: (
                        note(f"the backward of {title} from finite output gradients")
                        if healthy and all(healthy) and not _finite(gradient)
                        else None
                    )
                )

    def gradient_of(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: None if _finite(gradient) else note(f"{GRADIENT} {name}")

    handles: list[Any] = [
        m.register_forward_hook(forward(name, m), with_kwargs=True) for name, m in model.named_modules()
    ]
    handles += [p.register_hook(gradient_of(name)) for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _finite(value: object) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors_in(value) if t.is_floating_point())
