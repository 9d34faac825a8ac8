"""Proof that a parallel run computes what one device computes: `polyreme.verify(model, config, batch)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from polyreme.verify.report import Difference, Verdict
from polyreme.verify.run import verify

__all__ = ["Difference", "Verdict", "verify"]


class _Callable(ModuleType):
    """This package, which is also the function `polyreme.verify`."""

    def __call__(self, *args: Any, **options: Any) -> Verdict:
        return verify(*args, **options)


sys.modules[__name__].__class__ = _Callable
