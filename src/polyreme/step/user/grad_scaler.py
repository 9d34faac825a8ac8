"""The refusal of torch's GradScaler beside an engine, as its factor would go into the gradients, and an
engine scales losses itself.

Invariant: `torch.amp.GradScaler` is torch's own again once no user loop is left (`user.backward`). Backwards
that reach no engine, and disabled scalers, are left alone. No communication."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from polyreme.errors import ModelError
from polyreme.step.user.other_optimizers import is_given

_OWN: dict[str, Callable[..., Any]] = {}
_scaled = -1  # autograd's id of the last backward through a scaled loss


def watch() -> None:
    """Watch the calls of scalers, until `restore`."""
    if not _OWN:
        for name, instead in (("scale", _scale), ("unscale_", _unscale), ("step", _step)):
            _OWN[name] = getattr(GradScaler, name)
            setattr(GradScaler, name, functools.wraps(_OWN[name])(instead))


def restore() -> None:
    """Restore the calls of scalers that `watch` replaced."""
    for name, own in _OWN.items():
        setattr(GradScaler, name, own)
    _OWN.clear()


def check() -> None:
    """Raise ModelError where the backward under way began with a loss that a scaler has scaled."""
    if _scaled == torch._C._current_graph_task_id() != -1:
        raise ModelError(_refusal("scaler.scale(loss)"))


def _scale(scaler: GradScaler, outputs: Any) -> Any:
    found = _OWN["scale"](scaler, outputs)
    if scaler.is_enabled():
        for each in (
            [found] if isinstance(found, Tensor) else found if isinstance(found, list | tuple) else ()
        ):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(_note)
    return found


def _note(gradient: Tensor) -> None:
    global _scaled
    _scaled = torch._C._current_graph_task_id()


def _unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
    _refuse(scaler, optimizer, "scaler.unscale_(optimizer)")
    _OWN["unscale_"](scaler, optimizer)


def _step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **named: Any) -> Any:
    _refuse(scaler, optimizer, "scaler.step(optimizer)")
    return _OWN["step"](scaler, optimizer, *args, **named)


def _refuse(scaler: GradScaler, optimizer: Optimizer, call: str) -> None:
    if scaler.is_enabled() and (getattr(optimizer, "is_of_engine", False) or is_given(optimizer)):
        raise ModelError(_refusal(call))


def _refusal(call: str) -> str:
    return (
        f"{call} of a GradScaler, whose scale would go into the gradients of an engine: precision.compute = "
        '"fp16" or "autocast-fp16" scales losses by itself, and other dtypes need no scale. Leave the scaler '
        "out, or make it with enabled=False: engine.backward(loss), then engine.step()"
    )
