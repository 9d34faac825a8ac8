"""Modules and names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, elsewhere: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: of its modules, and of the names in `elsewhere`, by the module within
    the package that has each ("module:name" where it is called otherwise there, "module:" for the module)."""

    def get(name: str) -> Any:
        if elsewhere and name in elsewhere:
            where, colon, attribute = elsewhere[name].partition(":")
            module = importlib.import_module(f"{package}.{where}")
            return module if colon and not attribute else getattr(module, attribute or name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
