"""Make `import deepspeed[.x.y]` find the modules of `polyreme.compat.deepspeed`, among them those of its
table `names`, and `importlib.metadata` a distribution of that name.

Invariants: a module is one object under both names, and keeps its own `__name__` and `__spec__`; nothing of
Python or of a library is patched; no module is imported before it is asked for; a system of that name that
was imported before is never mixed with this one. Imports nothing heavy, as every Python process that a rank
starts imports this (see `site/sitecustomize.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from polyreme.errors import PolyremeError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

DOORS = "POLYREME_DOORS"
"""The variable that names the doors (with commas between) that Python processes open as they start."""

VERSIONS = {"deepspeed": "0.19.8"}
"""The names of the doors, and for each the version of the system whose names it has."""

SITE = Path(__file__).with_name("site")
"""The folder of the `sitecustomize` that opens doors, for PYTHONPATH."""

# modules that look for DeepSpeed once, as they are imported
_LOOKED = ("accelerate", "transformers.integrations.deepspeed")


class DoorError(PolyremeError, ImportError):
    """The error of a door that cannot be opened, as another module of its name is imported, or was looked
    for, already."""


class MissingModuleError(DoorError, ModuleNotFoundError):
    """The error of a module of the other system that its door does not have."""


def install(name: str) -> None:
    """Make `import NAME` find Polyreme's door of that name, in this process and in the Python processes that
    it starts. A second call does no harm.

    Raises DoorError if another module of that name is imported already, or libraries that use it have looked
    for it."""
    target = f"{__package__}.{name}"
    if name in sys.modules and sys.modules[name] is not sys.modules.get(target):
        where = getattr(sys.modules[name], "__file__", None) or repr(sys.modules[name])
        raise DoorError(
            f"{name} is imported already ({where}), and is not Polyreme's; "
            f"call {target}.install() before anything imports it, or start with `polyreme launch --{name}`"
        )
    doors = [finder for finder in sys.meta_path if isinstance(finder, Door) and finder.name == name]
    if not doors and (looked := [module for module in _LOOKED if module in sys.modules]):
        raise DoorError(
            f"{looked[0]} is imported already, and has looked for {name}; call "
            f"{target}.install() at the top of the script, or start with `polyreme launch --{name}`"
        )
    door: Any = doors[0] if doors else Door(name, VERSIONS[name])
    sys.meta_path[:] = [door, *(finder for finder in sys.meta_path if finder is not door)]
    os.environ.update(variables(name))


def variables(name: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables by which Python processes open the door `name` as they start. They
    keep the values that are `inherited`, and add to them."""
    doors = [door for door in inherited.get(DOORS, "").split(",") if door and door != name]
    paths = inherited.get("PYTHONPATH", "")
    others = [path for path in paths.split(os.pathsep) if path != str(SITE)] if paths else []
    return {DOORS: ",".join([*doors, name]), "PYTHONPATH": os.pathsep.join([str(SITE), *others])}


class Door:
    """A finder (of `sys.meta_path`) of the modules and the distribution `name`."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version
        self.target = f"{__package__}.{name}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `deepspeed[.x.y]`, whose loader returns Polyreme's module; None for any other
        name.

        Raises MissingModuleError if the door has no such module."""
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        own = importlib.util.find_spec(self.target + fullname[len(self.name) :])
        if own is None:
            raise self._missing(fullname)
        return _OtherName(own).spec(fullname)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the distribution `name` if it is asked for by name, or with all others; nothing if folders
        are given, as it lies in none."""
        from polyreme.compat.distribution import DoorDistribution, normalized

        if "path" in vars(context) or (context.name and normalized(context.name) != self.name):
            return []
        return [DoorDistribution(self.name, self.version)]

    def _missing(self, fullname: str) -> MissingModuleError:
        parent = fullname.rpartition(".")[0]
        package = importlib.import_module(self.target + parent[len(self.name) :])
        below = {module.name for module in pkgutil.iter_modules(package.__path__)}
        rows = (row.rpartition(".") for row in importlib.import_module(f"{self.target}.names").SAME)
        there = sorted(below | {name for above, _, name in rows if f"{self.name}.{above}" == parent})
        return MissingModuleError(
            f"No module named {fullname!r}: `import {self.name}` is answered by Polyreme ({self.target}), "
            f"which does not have this module of {self.name} {self.version}. "
            f"{parent} has {', '.join(there) or 'no modules'}; use one of these, "
            f"or start without the door to use another {self.name}",
            name=fullname,
        )


class Names:
    """A finder (of `sys.meta_path`) of those modules in a door's `package` that are no files, but rows of its
    `table` (such as `deepspeed.names`): further paths of its modules, and modules whose names are all
    refused."""

    def __init__(self, package: str, table: Any) -> None:
        self.package, self.table = package, table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has a row, or of a file with rows inside it, which becomes a
        package; None for others."""
        if not fullname.startswith(f"{self.package}."):
            return None
        name = fullname[len(self.package) + 1 :]
        if name in self.table.SAME:
            own = importlib.util.find_spec(f"{self.package}.{self.table.SAME[name]}")
            return None if own is None else _OtherName(own).spec(fullname)
        if not self.table.has_below(name):
            return None  # which leaves it to the other finders
        loader: Any = _Refused(name, self.table)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:  # none, or a folder that is left from a module of before
            spec = ModuleSpec(fullname, loader)
        if spec.submodule_search_locations is None:
            spec.submodule_search_locations = []
        return spec


class _Refused:
    """A loader of a module whose every name is a stand-in, which raises UnsupportedError when it is
    called."""

    def __init__(self, name: str, table: Any) -> None:
        self.name, self.table = name, table

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> Any:
            if (found := self.table.refused_name(self.name, name)) is None:
                raise AttributeError(f"{module.__name__} has no {name!r}")
            return found

        module.__getattr__ = get  # type: ignore[method-assign]


class _OtherName:
    """A loader that returns a module under another name than its own."""

    def __init__(self, own: ModuleSpec) -> None:
        self._own = own

    def spec(self, fullname: str) -> ModuleSpec:
        """Return the module's spec under the other name."""
        loader: Any = self
        spec = ModuleSpec(fullname, loader, origin=self._own.origin)
        spec.submodule_search_locations = self._own.submodule_search_locations
        spec.has_location = self._own.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own.name)
        self._kept = module.__spec__  # in whose place the import that goes on puts its own
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._kept

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, which `python -m` runs."""
        code: CodeType | None = self._inspect().get_code(self._own.name)
        return code

    def get_source(self, fullname: str) -> str | None:
        source: str | None = self._inspect().get_source(self._own.name)
        return source

    def is_package(self, fullname: str) -> bool:
        return self._own.submodule_search_locations is not None

    def _inspect(self) -> Any:
        return self._own.loader
