"""Add the backend "mpi" of `mpi_group` to torch.distributed, where torch was built without MPI, so that
`torch.distributed.init_process_group("mpi")` works after `import polyreme`.

Imports neither torch nor mpi4py before they are used. No communication."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TARGET = "torch.distributed.distributed_c10d"


class ProcessGroupMPI:
    """The class that torch asks for an MPI group."""

    timeout, size, rank = timedelta(minutes=30), -1, -1
    """Arguments of the group which is being made; -1 where MPI decides."""

    @classmethod
    def create(cls, ranks: Sequence[int]) -> Any:
        """Return a group of these ranks, or of all for an empty list."""
        from polyreme.distributed import mpi_group

        return mpi_group.create(ranks, cls.timeout, cls.size, cls.rank)


def add_mpi() -> None:
    """Add the backend to torch.distributed, now or when that is imported. May be called again."""
    after_import(TARGET, _add)


def after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call `call` with the module `name`, now or when it has been imported; once, however often this is
    asked."""
    if name in sys.modules:
        call(sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, call))


def _add(c10d: Any) -> None:
    if c10d._MPI_AVAILABLE or hasattr(c10d, "ProcessGroupMPI"):
        return
    make: Callable[..., Any] = c10d._new_process_group_helper

    @functools.wraps(make)
    def noting(size: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        """Make a group of any backend; torch does not tell one of MPI its deadline, nor its size."""
        ProcessGroupMPI.timeout = kwargs.get("timeout") or ProcessGroupMPI.timeout
        ProcessGroupMPI.size, ProcessGroupMPI.rank = size, rank
        c10d._MPI_AVAILABLE = True
        try:
            return make(size, rank, *args, **kwargs)
        finally:
            # `is_mpi_available` must still say what torch was built with: Accelerate, if given no backend,
            # takes MPI where it is available, whoever started the ranks
            c10d._MPI_AVAILABLE = False

    c10d._new_process_group_helper, c10d.ProcessGroupMPI = noting, ProcessGroupMPI


class _Finder(MetaPathFinder):
    """An import hook that adds a call to the end of the import of one module."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self.name, self._call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
