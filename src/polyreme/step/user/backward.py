"""Tells loops of the user's own the loss whose backward begins. Autograd's hooks see gradients alone, and
when the first of them comes, what the loss was made from is freed.

Invariant: `torch.autograd.backward`, which `Tensor.backward` calls, and what `grad_scaler` watches are
torch's own again when the last loop has closed or is gone. Communication: none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.step.user import grad_scaler


class Listener(Protocol):
    """What is told of the backwards that users begin."""

    def announce(self, loss: Tensor | None) -> None:
        """The backward of `loss` begins; None: it has ended."""

    def follow(self, roots: Sequence[Tensor]) -> None:
        """The backward of all of these begins; of none: it has ended."""


_LISTENERS: WeakSet[Any] = WeakSet()
_TORCH: Callable[..., None] = torch.autograd.backward


def listen(listener: Listener) -> None:
    """Tell `listener` of each backward, and of each of one scalar, in whichever thread, until `forget`, or
    until it is gone."""
    if not listeners() and not getattr(torch.autograd.backward, "polyreme", False):
        global _TORCH
        _TORCH = torch.autograd.backward
        torch.autograd.backward = _backward = functools.wraps(_TORCH)(_telling)
        _backward.polyreme = True  # type: ignore[attr-defined]
    grad_scaler.watch()
    _LISTENERS.add(listener)
    finalize(listener, _restore).atexit = False


def forget(listener: Listener) -> None:
    """Tell `listener` no more."""
    _LISTENERS.discard(listener)
    _restore()


def _restore() -> None:
    """Give torch its own functions back where nobody listens."""
    if not listeners():
        grad_scaler.restore()
        if getattr(torch.autograd.backward, "polyreme", False):
            torch.autograd.backward = _TORCH


def listeners() -> list[Any]:
    """Those who are told."""
    return list(_LISTENERS)


def _telling(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    one = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
    told = listeners()
    is_loss = isinstance(one, Tensor) and one.numel() == 1 and grad_tensors is None
    try:
        for listener in told:
            listener.follow([each for each in pytree.tree_leaves(tensors) if isinstance(each, Tensor)])
            if is_loss:
                listener.announce(one)
        _TORCH(tensors, grad_tensors, *args, **kwargs)
    finally:
        for listener in told:
            listener.follow(())
            if is_loss:
                listener.announce(None)
