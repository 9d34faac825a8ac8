"""Gradient mode for training: on, whatever the script has set around the call, by `no_grad`, `inference_mode`
or `set_grad_enabled(False)`.

Communication: none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def with_gradients(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that runs with gradients on, and outside of inference mode."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.enable_grad():
            return method(*args, **kwargs)

    return run
