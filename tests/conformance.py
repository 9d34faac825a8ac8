"""What every `Backend` keeps to, on whatever ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest.mock import patch

import torch
from torch import Tensor

from polyreme.distributed import mesh
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.simulated import Simulated

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@contextmanager
def own_collectives() -> Iterator[None]:
    """Have meshes that are opened meanwhile use the process group's own collectives: on CPUs the path that
    GPUs take."""
    with patch.object(mesh, "exchanges_directly", lambda group: False):
        yield


def axis_over(kind: str, rank: int, world: int, timeout: float = 600.0) -> Axis:
    if kind == "simulated":
        return Axis("dp", world, rank, Simulated(world, rank))
    with own_collectives() if kind == "process group" else nullcontext():
        return Mesh.open(
            {"dp": world}, timeout=timedelta(seconds=timeout), shared_memory=kind == "shared memory"
        ).dp


def alike(size: int, dtype: torch.dtype) -> Tensor:
    """What every rank gives: whole numbers, whose sums are exact whatever the order."""
    return torch.arange(size, dtype=torch.float64).remainder(7).to(dtype)


def conforms(rank: int, world: int, kind: str) -> None:
    axis = axis_over(kind, rank, world)
    assert axis.backend.kind == (kind if kind != "shared memory" or heap() else "gloo direct")
    assert axis.backend.deterministic == (kind != "process group")
    cpu, sent = torch.device("cpu"), {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for size in (1, 64, 5000):
        for dtype in DTYPES:
            shard = axis.empty(size, dtype, cpu).copy_(alike(size, dtype))
            full = axis.empty(world * size, dtype, cpu)
            work = axis.all_gather(full, shard, " of a test")
            work.wait()
            work.wait()  # nothing more
            work.settle()
            assert torch.equal(full, alike(size, dtype).repeat(world)), (size, dtype)
            axis.all_gather(full, full.chunk(world)[rank]).settle()  # in place
            for out_dtype in dict.fromkeys(
                (dtype, torch.float32, torch.float64)[: 3 if dtype.itemsize < 8 else 1]
            ):
                out = axis.empty(size, out_dtype, cpu)
                axis.reduce_scatter(out, full).settle()
                assert torch.equal(out, alike(size, out_dtype) * world), (size, dtype, out_dtype)
                axis.reduce_scatter(out, full, accumulate=True).settle()
                assert torch.equal(out, alike(size, out_dtype) * (2 * world)), (size, dtype, out_dtype)
                sent["reduce_scatter"] += 2 * (world - 1) * size * dtype.itemsize
            axis.all_reduce(full).wait()
            assert torch.equal(full, alike(size, dtype).repeat(world) * world)
            axis.broadcast(shard, source=world - 1)
            assert torch.equal(shard, alike(size, dtype))
            sent["all_gather"] += 2 * (world - 1) * size * dtype.itemsize
            sent["all_reduce"] += axis.backend.bytes_of_all_reduce(world * size * dtype.itemsize)
    assert {name: axis.counts[name].bytes for name in sent} == sent
    sending = axis.send(alike(9, torch.float32), (rank + 1) % world)
    got = torch.full((9,), -1.0)
    axis.receive(got, (rank - 1) % world).wait()
    sending.settle()
    assert torch.equal(got, alike(9, torch.float32))
    assert axis.gather_objects({"a": [1, 2]}) == [{"a": [1, 2]}] * world
    assert axis.gather_objects("x" * 5000) == ["x" * 5000] * world  # more than goes at once
    axis.barrier()
