"""Ranges in a GPU profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from polyreme.compat.deepspeed.accelerator import get_accelerator

P = ParamSpec("P")
R = TypeVar("R")
enable_nvtx = True


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """`func`, whose calls are ranges of a profile by its name; not while torch compiles it."""

    @functools.wraps(func)
    def instrumented(*args: P.args, **kwargs: P.kwargs) -> R:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return instrumented
