"""Gradients are on where an engine trains, whatever the script has set around the call: `no_grad`,
`inference_mode`, or a `set_grad_enabled(False)` that it has left behind.

Communication: none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def with_gradients(method: Callable[P, T]) -> Callable[P, T]:
    """Marks a method in which gradients are on, and tensors that it makes may have some later."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.enable_grad():
            return method(*args, **kwargs)

    return run
