"""Gives torch.distributed the backend "mpi" of `mpi_group`, where torch was built without MPI: so that
`torch.distributed.init_process_group("mpi")` works after `import polyreme`.

torch is not imported here, nor is mpi4py: both when they are used. No communication."""

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
    """What torch asks for a group of MPI."""

    timeout, size, rank = timedelta(minutes=30), -1, -1
    """Those of the group which is being made; -1 for what MPI is to say."""

    @classmethod
    def create(cls, ranks: Sequence[int]) -> Any:
        """A group of these ranks, of all where there are none."""
        from polyreme.distributed import mpi_group

        return mpi_group.create(ranks, cls.timeout, cls.size, cls.rank)


def add_mpi() -> None:
    """Give torch.distributed the backend, now or when it is imported. Again is harmless."""
    after_import(TARGET, _add)


def after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call `call` with the module `name`, now or when it has been imported, once however often it is asked
    for."""
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
            # `is_mpi_available` still says what torch was built with: who is told no backend (Accelerate)
            # takes MPI where it can, though something else started the ranks
            c10d._MPI_AVAILABLE = False

    c10d._new_process_group_helper, c10d.ProcessGroupMPI = noting, ProcessGroupMPI


class _Finder(MetaPathFinder):
    """Adds a call to the end of the import of one module."""

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
