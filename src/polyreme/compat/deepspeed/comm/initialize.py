"""DeepSpeed's `init_distributed`, by which ranks meet: as the variables of a launcher say, or mpirun through
mpi4py, or as a single process.

Invariant: a single process listens on loopback alone."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.comm.timed import comms_logger
from polyreme.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from polyreme.compat.deepspeed.refusal import OrderError
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.distributed.environment import Environment, announce, detect
from polyreme.distributed.process_group import close, open_group
from polyreme.errors import LaunchError, TransportError


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set what the communication logger records, by the `comms_config` of a config and by the arguments,
    which count before it."""
    if deepspeed_config is not None and deepspeed_config.comms_config.comms_logger_enabled:
        comms_logger.configure(deepspeed_config.comms_config)
    given = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    vars(comms_logger).update({name: value for name, value in given.items() if value is not None})


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Open the process group, unless one is open. Ranks meet as `init_method`, `rank` and `world_size` say,
    or else the launcher's variables; without any of these, this process is the only rank.

    dist_backend: None: the accelerator's own. With NCCL, gloo is opened, too, for tensors of the CPU. Raises
    OrderError for `dist_init_required=False` without an open group, TransportError if the ranks cannot meet,
    and LaunchError for variables that contradict each other."""
    configure(config)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise OrderError(
            "dist_init_required=False, and no process group is open: leave it out, or open a group by "
            "torch.distributed.init_process_group before"
        )
    backend = dist_backend or get_accelerator().communication_backend_name()
    if backend == "nccl":
        backend = "cuda:nccl,cpu:gloo"
    if init_method is not None or rank >= 0 or world_size > 0:
        _join(lambda: dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size))  # fmt: skip
        return
    place = _place(auto_mpi_discovery, distributed_port, verbose)
    if place.alone:
        # the name of the loopback interface differs between systems
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        _join(lambda: dist.init_process_group(
            backend, store=dist.HashStore(), timeout=timeout, rank=0, world_size=1))  # fmt: skip
    else:
        if place.rank == 0 and verbose:
            logger.info(f"Opening a process group of {place.world_size} ranks with {backend}")
        open_group(backend, place, timeout)


def _join(open_group: Callable[[], None]) -> None:
    try:
        open_group()
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"the ranks could not meet: {error}") from error
    atexit.register(close)


def _place(auto_mpi_discovery: bool, port: int, verbose: bool) -> Environment:
    """Return this process's rank and where ranks meet, as the launcher's variables say, or under mpirun
    mpi4py."""
    try:
        return detect()
    except LaunchError as error:
        if not auto_mpi_discovery:
            raise
        try:
            mpi_discovery(port, verbose)
        except ImportError:
            raise error from None
        return detect()


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Ask mpi4py for this process's rank, and write it to the variables that torch reads. Ranks meet on the
    first one's host. Collective over MPI's processes; raises ImportError without mpi4py."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    host = MPI.Get_processor_name()
    hosts = world.allgather(host)
    address = world.bcast(
        socket.gethostbyname(socket.gethostname()) if world.Get_rank() == 0 else None, root=0
    )
    place = Environment(
        "MPI",
        rank=world.Get_rank(),
        world_size=world.Get_size(),
        local_rank=hosts[: world.Get_rank()].count(host),
        local_world_size=hosts.count(host),
        address=(address, distributed_port),
    )
    announce(place)
    if verbose:
        logger.info(f"MPI says: {place}")
