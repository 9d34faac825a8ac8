"""torch.distributed by the names of DeepSpeed's backend."""

from __future__ import annotations

import os
from typing import Any

from polyreme.compat.deepspeed.comm import comm
from polyreme.distributed.environment import WORLD_SIZE


def known_world_size(world_size: int | None) -> int | None:
    """The number of ranks that is given, or else the launcher's; None where neither says it."""
    if world_size is not None and world_size > 0:
        return world_size
    told = os.environ.get(WORLD_SIZE, "")
    return int(told) if told.isdigit() and int(told) > 0 else None


class TorchBackend:
    """An object whose methods are the functions of `deepspeed.comm`; to make one opens the process group."""

    def __init__(
        self,
        backend: str | None,
        timeout: Any,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name, self.initialized = name, True
        self.init_process_group(backend, timeout, init_method, rank, world_size)

    def init_process_group(
        self, backend: str | None, timeout: Any, init_method: str | None, rank: int, world_size: int
    ) -> None:
        """Open the process group, unless one is open."""
        given = {} if timeout is None else {"timeout": timeout}
        comm.init_distributed(backend, init_method=init_method, rank=rank, world_size=world_size, **given)
        self.using_mpi = comm.get_backend() == "mpi"

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)
