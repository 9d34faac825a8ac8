"""Every backend keeps to the contract of `Backend`."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import threads
from conformance import axis_over, conforms
from polyreme.distributed.mesh import Axis
from polyreme.distributed.simulated import Simulated
from polyreme.errors import TransportError
from pool import Ranks

KINDS = ("process group", "gloo direct", "shared memory", "threads", "simulated")


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
