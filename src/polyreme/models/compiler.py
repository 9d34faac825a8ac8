"""Keeps functions out of torch.compile's graphs, without importing its compiler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that torch.compile breaks its graph at it. (torch.compiler.disable imports the
    compiler, which costs a second in every process, even if it compiles nothing.)"""

    @functools.cache
    def disabled() -> Callable[P, T]:
        found: Callable[P, T] = torch.compiler.disable(function)
        return found

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        compiling = "torch._dynamo" in sys.modules
        return (disabled() if compiling else function)(*args, **kwargs)

    return call
