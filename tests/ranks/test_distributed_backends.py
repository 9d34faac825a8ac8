"""Every backend keeps to the contract of `Backend`."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import threads
from conformance import axis_over, breaks_off, conforms
from polyreme.distributed.mesh import Axis
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.simulated import Simulated
from polyreme.distributed.watch import break_off
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


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("world", [2, 4])
def test_what_is_under_way_can_be_broken_off(ranks: Ranks, world: int, kind: str) -> None:
    (threads.run if kind == "threads" else ranks)(world, breaks_off, kind, kind != "process group")


def breaks_off_after_another(rank: int, world: int) -> None:
    """The second rank has closed its connections when the first one, which waits for the last, breaks off."""
    axis_over("gloo direct", rank, world).barrier()
    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    if rank == 1:
        break_off(group)
    elif rank == 0:
        with pytest.raises(RuntimeError):
            while True:
                dist.irecv(torch.zeros(1), group=group, group_src=1, tag=7)
                time.sleep(0.01)
        waiting = dist.irecv(torch.zeros(1), group=group, group_src=2, tag=8)
        assert waiting is not None
        break_off(group)
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            waiting.wait(timedelta(seconds=20))
        assert time.monotonic() - start < 10
    dist.barrier()


def test_a_rank_breaks_off_where_another_has_before(ranks: Ranks) -> None:
    ranks(3, breaks_off_after_another)


def gives_to_each(rank: int, world: int, kind: str) -> None:
    """Ranks give others as many numbers as each pair has: some none, more than RING times."""
    axis = axis_over(kind, rank, world)
    for number in range(300):
        counts = [[(7 * a + 3 * b + number) % 5 * 100 for b in range(world)] for a in range(world)]
        mine = [torch.full((count,), 10.0 * rank + to) for to, count in enumerate(counts[rank])]
        sizes = [each[rank] for each in counts]
        got = torch.empty(sum(sizes))
        axis.all_to_all(got, torch.cat(mine), sizes, counts[rank]).wait()
        wanted = [torch.full((size,), 10.0 * source + rank) for source, size in enumerate(sizes)]
        assert torch.equal(got, torch.cat(wanted)), number


def sends_many(rank: int, world: int, kind: str) -> None:
    """More messages than a board has places, of many sizes; received later than sent."""
    axis = axis_over(kind, rank, world)
    if rank == 0:
        mine = [torch.full((number % 7 * 300 + 1,), float(number)) for number in range(600)]
        for work in [axis.send(each, 1) for each in mine]:
            work.settle()
    else:
        places = [torch.empty(number % 7 * 300 + 1) for number in range(600)]
        for number, place in enumerate(places):
            axis.receive(place, 0).wait()
            assert bool((place == number).all()), number
    axis.barrier()


def gives_too_little(rank: int, world: int, kind: str) -> None:
    axis = axis_over(kind, rank, world, timeout=5.0)
    with (
        pytest.raises(TransportError, match="rank 1 of axis dp gives 12 bytes and not 16")
        if rank == 0
        else (nullcontext())
    ):
        if rank:
            axis.send(torch.ones(3), 0)
        else:
            axis.receive(torch.ones(4), 1).wait()
    with pytest.raises(TransportError, match="gives 8 bytes and not 12") if rank else nullcontext():
        taken = [1, 2] if rank == 0 else [3, 1]  # rank 1 takes one more than it is given
        axis.all_to_all(torch.ones(sum(taken)), torch.ones(3), taken, [1, 2] if rank == 0 else [2, 1]).wait()


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_give_each_other_as_much_as_they_have(ranks: Ranks, world: int, kind: str) -> None:
    (threads.run if kind == "threads" else ranks)(world, gives_to_each, kind)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_messages_arrive_in_their_order(ranks: Ranks, kind: str) -> None:
    (threads.run if kind == "threads" else ranks)(2, sends_many, kind)


@pytest.mark.skipif(heap() is None, reason="no memory that ranks share here")
def test_sizes_that_differ_are_an_error_at_once(ranks: Ranks) -> None:
    ranks(2, gives_too_little, "shared memory")


def test_simulated_ranks_move_tensors_without_numbers() -> None:
    axis = Axis("dp", 1000, 999, Simulated(1000, 999))
    for device, mode in (("meta", None), ("cpu", FakeTensorMode())):
        with mode or torch.no_grad():
            shard, full = torch.ones(8, device=device), torch.ones(8000, device=device)
            axis.all_gather(full, shard).settle()
            axis.reduce_scatter(torch.ones(8, device=device), full).settle()
            axis.all_reduce(shard).settle()
            axis.all_to_all(torch.ones(8000, device=device), full).settle()
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
