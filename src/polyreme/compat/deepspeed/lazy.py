"""Import the modules and names of a package when they are first looked up."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyreme.compat.deepspeed.names import refused_name


def lazily(package: str, elsewhere: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package`: of its modules, of the names that `names.REFUSED` has for it, and
    of the names in `elsewhere`, by the module within the package that has each ("module:name" where it is
    called otherwise there, "module:" for the module)."""
    within = package.removeprefix(__package__).removeprefix(".")

    def get(name: str) -> Any:
        if elsewhere and name in elsewhere:
            where, colon, attribute = elsewhere[name].partition(":")
            module = importlib.import_module(f"{package}.{where}")
            return module if colon and not attribute else getattr(module, attribute or name)
        if (refused := refused_name(within, name)) is not None:
            return refused
        is_package = "__path__" in vars(sys.modules[package])
        if is_package and not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"{package} has no {name!r}")

    return get
