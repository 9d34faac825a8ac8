"""Notices to user loops of each backward that begins, with its loss. Autograd's hooks see gradients alone,
and by the first of them the inputs of the loss are freed.

Invariant: `torch.autograd.backward`, which `Tensor.backward` calls, and the calls that `grad_scaler` watches
are torch's own again once the last loop has closed or is gone. Communication: none."""

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
    """A receiver of notices on backwards that users begin."""

    def announce(self, loss: Tensor | None) -> None:
        """Note that the backward of `loss` begins; None: that it has ended."""

    def follow(self, roots: Sequence[Tensor]) -> None:
        """Note that the backward of all of these begins; of none: that it has ended."""


_LISTENERS: WeakSet[Any] = WeakSet()
_TORCH: Callable[..., None] = torch.autograd.backward


def listen(listener: Listener) -> None:
    """Notify `listener` of each backward in any thread, and with `announce` of each of one scalar, until
    `forget` or until it is gone."""
    if not listeners() and not getattr(torch.autograd.backward, "polyreme", False):
        global _TORCH
        _TORCH = torch.autograd.backward
        torch.autograd.backward = _backward = functools.wraps(_TORCH)(_telling)
        _backward.polyreme = True  # type: ignore[attr-defined]
    grad_scaler.watch()
    _LISTENERS.add(listener)
    finalize(listener, _restore).atexit = False


def forget(listener: Listener) -> None:
    """Stop notifying `listener`."""
    _LISTENERS.discard(listener)
    _restore()


def _restore() -> None:
    """Restore torch's own functions if nobody listens any more."""
    if not listeners():
        grad_scaler.restore()
        if getattr(torch.autograd.backward, "polyreme", False):
            torch.autograd.backward = _TORCH


def listeners() -> list[Any]:
    """Return all listeners."""
    return list(_LISTENERS)


def _telling(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    one = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
    notified = listeners()
    is_loss = isinstance(one, Tensor) and one.numel() == 1 and grad_tensors is None
    try:
        for listener in notified:
            listener.follow([each for each in pytree.tree_leaves(tensors) if isinstance(each, Tensor)])
            if is_loss:
                listener.announce(one)
        _TORCH(tensors, grad_tensors, *args, **kwargs)
    finally:
        for listener in notified:
            listener.follow(())
            if is_loss:
                listener.announce(None)
