"""Attributes of attributes, by dotted names."""

from __future__ import annotations

import functools
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """What `model` has under the dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Put `module` into `model` under the dotted name."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)
