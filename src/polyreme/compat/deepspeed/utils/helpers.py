"""DeepSpeed's helper functions: attributes by dotted names, versions of torch, ranges in a GPU's profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.torch_version import TorchVersion

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.lazy import lazily
from polyreme.errors import PolyremeError

P = ParamSpec("P")
R = TypeVar("R")
enable_nvtx = True


class DeprecatedException(PolyremeError):
    """The error of a call that DeepSpeed has removed."""


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute of `model` with this dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute of `model` with this dotted name to `module`."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Return `func`, whose calls are ranges of a GPU's profile by its name; not while torch compiles it."""

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


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether torch's version lies between these."""
    version = TorchVersion(torch.__version__)
    above = min_version is None or version >= str(min_version)
    return above and (max_version is None or version <= str(max_version))


__getattr__ = lazily(__name__)
