"""The stores for numbers outside device memory: in host memory, or in files.

Communication: the name of the run, from rank 0."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

from polyreme.config.schema import is_files, tiers_of
from polyreme.distributed.mesh import Mesh
from polyreme.offload.copy_stream import CopyStream, copy_stream_to
from polyreme.offload.file import BUFFERS, FileStore
from polyreme.offload.host import HostStore
from polyreme.offload.host_transfer import HostTransfer
from polyreme.offload.planned import PlannedStore
from polyreme.offload.store import Store
from polyreme.placement.settings import PlacementSettings
from polyreme.zero.offload_tiers import OffloadTiers

RUN = uuid.uuid4().hex
"""A random number that, with the process id, names the runs that this process leads as rank 0: engines made
one after the other may use the same folders."""


def open_stores(settings: PlacementSettings, mesh: Mesh) -> OffloadTiers:
    """Open the stores that the settings name, empty. All ranks must call."""
    device, memory = mesh.device, settings.memory
    folders, _ = tiers_of(memory.states)
    near, _ = tiers_of(memory.params)
    reduced, _ = tiers_of(memory.gradients)
    run = mesh.gather_objects(f"{RUN}-{os.getpid()}")[0]
    transfer = HostTransfer.over(device) if folders != ["device"] else None
    states = _store(folders, mesh, run)
    params = _store(near, mesh, run, copy_stream_to(device), buffers=0)  # parameters are not streamed
    gradients = None
    if settings.gradients_leave:
        copy_stream = None if transfer is None else transfer.copy_stream
        gradients = _store(reduced if is_files(reduced) else ["host"], mesh, run, copy_stream)
    return OffloadTiers(states, params, settings.compact, transfer, gradients, mesh.gather_objects)


def _store(
    where: Sequence[str], mesh: Mesh, run: str, copy_stream: CopyStream | None = None, buffers: int = BUFFERS
) -> Store | None:
    """Return this rank's store in host memory, or in folders, claimed for `run`; None for the device."""
    if not mesh.has_numbers and where != ["device"]:
        return PlannedStore(not is_files(where), buffers)
    if not is_files(where):
        return HostStore(mesh.device, copy_stream) if where == ["host"] else None
    pin = mesh.device.type == "cuda"
    return FileStore(where, mesh.rank, run, buffers=buffers, copy_stream=copy_stream, pin=pin)
