"""Ranks that are threads keep apart what is a rank's own, and none hangs where another fails."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

import threads
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import TransportError
from pool import RanksFailed


def axis_of(world: int) -> Axis:
    return Mesh.open({"dp": world}, timeout=timedelta(seconds=1)).dp


def drawn(rank: int, world: int) -> list[float]:
    axis, found = axis_of(world), []
    torch.manual_seed(rank)
    for _ in range(3):
        found.append(torch.rand(()).item())
        axis.barrier()
    return found


def test_random_numbers_are_a_ranks_own() -> None:
    before = torch.get_rng_state()
    for rank, found in enumerate(threads.run(3, drawn)):
        generator = torch.Generator().manual_seed(rank)
        assert found == [torch.rand((), generator=generator).item() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)


def raising(rank: int, world: int) -> None:
    axis = axis_of(world)
    if rank == 1:
        raise ValueError("of rank 1")
    axis.barrier()


def test_a_rank_that_raises_fails_all() -> None:
    with pytest.raises(RanksFailed, match="of rank 1") as caught:
        threads.run(3, raising)
    assert next(iter(caught.value.exceptions)) == 1
    assert isinstance(caught.value.exceptions[1], ValueError)
    for rank in (0, 2):
        error = caught.value.exceptions[rank]
        assert isinstance(error, TransportError) and "rank 1 raised ValueError: of rank 1" in str(error)


def circle(rank: int, world: int) -> None:
    axis_of(world).receive(torch.zeros(1), 1 - rank).wait()


def test_ranks_that_wait_for_each_other_fail() -> None:
    with pytest.raises(RanksFailed, match="no rank can go on: rank 0 waits in receive over dp, rank 1 waits"):
        threads.run(2, circle)


def other_order(rank: int, world: int) -> None:
    axis, tensor = axis_of(world), torch.zeros(2)
    axis.all_reduce(tensor).wait() if rank else axis.all_gather(torch.zeros(4), tensor).wait()


def test_operations_in_another_order_fail() -> None:
    with pytest.raises(RanksFailed, match=r"another rank began all-(gather|reduce) over dp in its place"):
        threads.run(2, other_order)


def late(rank: int, world: int) -> None:
    axis = axis_of(world)
    if rank == 1:
        time.sleep(3)
    axis.barrier()


def test_a_rank_that_is_late_fails_all_with_stacks() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)not done after 0.5 s.*rank 1:.*time\.sleep\(3\)"):
        threads.run(2, late, timeout=0.5)
