"""Every backend keeps to the contract of `Backend`."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import threads
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.simulated import Simulated
from polyreme.errors import TransportError
from pool import Ranks
from training import own_collectives

KINDS = ("process group", "gloo direct", "shared memory", "threads", "simulated")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_backend_keeps_to_its_contract(ranks: Ranks, world: int, kind: str) -> None:
    if kind == "simulated":
        for rank in range(world):
            conforms(rank, world, kind)
    else:
        (threads.run if kind == "threads" else ranks)(world, conforms, kind)


def test_simulated_ranks_move_tensors_without_numbers() -> None:
    axis = Axis("dp", 1000, 999, Simulated(1000, 999))
    for device, mode in (("meta", None), ("cpu", FakeTensorMode())):
        with mode or torch.no_grad():
            shard, full = torch.ones(8, device=device), torch.ones(8000, device=device)
            axis.all_gather(full, shard).settle()
            axis.reduce_scatter(torch.ones(8, device=device), full).settle()
            axis.all_reduce(shard).settle()
    assert axis.counts["all_gather"].bytes == 2 * 999 * 8 * 4


def gone(rank: int, world: int, kind: str) -> None:
    """A rank that never comes: the others' work fails, and stays so."""
    axis = axis_over(kind, rank, world, timeout=2.0)
    if rank == 0:
        return
    full = torch.zeros(world * 5000)
    try:
        work = axis.all_gather(full, torch.ones(5000))
    except TransportError:
        return
    for _ in range(2):
        with pytest.raises(TransportError):
            work.wait()
    with pytest.raises(TransportError):
        work.settle()


@pytest.mark.parametrize("kind", KINDS[:4])
def test_work_that_failed_stays_failed(ranks: Ranks, kind: str) -> None:
    (threads.run if kind == "threads" else ranks)(2, gone, kind)
