"""What every `Backend` keeps to, on whatever ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from polyreme.distributed import mesh
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.simulated import Simulated
from polyreme.distributed.world import current
from polyreme.errors import TransportError

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


def breaks_off(rank: int, world: int, kind: str, told: bool = True) -> None:
    """The first rank breaks off what the last one never comes to; others hear of it where they are `told`,
    and break it off themselves where not."""
    axis = axis_over(kind, rank, world)
    axis.barrier()
    if rank == world - 1:
        if told:
            with pytest.raises(TransportError, match=r"receive over dp.* failed, because"):
                axis.receive(torch.ones(1), 0).wait()
        axis.backend.abort("breaks off a test")
    else:
        work = axis.all_reduce(torch.ones(3))
        if rank == 0 or not told:
            axis.backend.abort("breaks off a test")
        for use in (work.wait, work.settle, axis.barrier):
            with pytest.raises(TransportError, match=r"all-reduce over dp.* failed, because"):
                use()
    axis.backend.close()
    current().close()


def conforms(rank: int, world: int, kind: str) -> None:
    axis = axis_over(kind, rank, world)
    assert axis.backend.kind == (kind if kind != "shared memory" or heap() else "gloo direct")
    assert axis.backend.deterministic == (kind != "process group")
    cpu = torch.device("cpu")
    sent = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "all_to_all": 0}
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
            parts = axis.empty(world * size, dtype, cpu).copy_(alike(size, dtype).repeat(world))
            axis.all_to_all(got := torch.zeros_like(parts), parts, of=" of a test").settle()
            assert torch.equal(got, parts), (size, dtype)
            # a rank gets as many as its number times `size`, the first none
            given, taken = [size * to for to in range(world)], [size * rank] * world
            whole = alike(sum(given), dtype)
            got = torch.full((sum(taken),), -1.0, dtype=dtype)
            axis.all_to_all(got, whole, taken, given).settle()
            assert torch.equal(got, whole.split(given)[rank].repeat(world)), (size, dtype)
            others = (world - 1) * size + sum(given) - given[rank]
            sent["all_to_all"] += others * dtype.itemsize
    assert {name: axis.counts[name].bytes for name in sent} == sent
    with pytest.raises(ValueError, match="parts of 1, 2 elements are not a tensor of 4"):
        axis.all_to_all(torch.ones(4), torch.ones(4), [1, 2], [1, 2])
    for size in () if kind == "simulated" else (0, 9, 70_000):  # to which nobody sends
        mine = [axis.empty(size, torch.float32, cpu).copy_(alike(size, torch.float32)), torch.ones(2, 3)]
        sending = [axis.send(each, (rank + 1) % world) for each in mine]
        got, other = torch.full((size,), -1.0), torch.zeros(2, 3)
        works = [axis.receive(each, (rank - 1) % world) for each in (got, other)]
        for work in [*works[::-1], *sending]:  # received in the order of their sends, whoever is waited for
            work.settle()
        assert torch.equal(got, mine[0])
        assert torch.equal(other, mine[1])
    assert axis.gather_objects({"a": [1, 2]}) == [{"a": [1, 2]}] * world
    assert axis.gather_objects("x" * 5000) == ["x" * 5000] * world  # more than goes at once
    axis.barrier()
