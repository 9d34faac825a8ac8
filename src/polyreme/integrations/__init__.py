"""Trainers of other libraries on Polyreme's engine and config: Hugging Face's Trainer, Accelerate's loops and
Lightning. Each library is imported only when its integration is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"PolyremeTrainer": "trainer", "PolyremeStrategy": "lightning"}
_MODULES = ("accelerate", "lightning", "trainer")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
