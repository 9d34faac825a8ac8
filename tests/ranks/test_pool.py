"""The rank pool itself: what every other test on ranks relies on."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from polyreme.errors import BatchError
from pool import Ranks, RanksFailed


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def total(rank: int, world_size: int, base: int) -> tuple[int, int, torch.Tensor]:
    value = torch.tensor([base + rank], dtype=torch.float64)
    dist.all_reduce(value)
    return rank, dist.get_world_size(), value


def fail_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise BatchError(f"bad batch on rank {rank}")
    dist.barrier()


def fail_in_turn(rank: int, world_size: int) -> NoReturn:
    if rank == 0:
        time.sleep(0.2)  # so that rank 1 fails first
    raise ValueError(f"rank {rank} says no")


def vanish(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_in_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        threading.Event().wait()


def leave_a_mess(rank: int, world_size: int) -> None:
    dist.new_group([0])
    dist.new_group(list(range(world_size)))
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def surroundings(rank: int, world_size: int) -> tuple[int, torch.dtype, bool, int, float]:
    groups = len(dist.distributed_c10d._world.pg_map)
    return (
        groups,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.rand(()).item(),
    )


def leave_the_group(rank: int, world_size: int) -> None:
    dist.destroy_process_group()


def warn_as_torch(rank: int, world_size: int) -> str:
    warnings.warn_explicit(
        "old name", FutureWarning, "file.py", 1, module="torch.distributed.distributed_c10d"
    )
    return "went on"


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank_from_one_process_group(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size, total, 10)
    assert [(rank, size) for rank, size, _ in results] == [(rank, world_size) for rank in range(world_size)]
    assert {value.item() for *_, value in results} == {sum(10 + rank for rank in range(world_size))}


def test_ranks_are_used_again(ranks: Ranks) -> None:
    first = ranks(2, pid)
    assert len(set(first)) == 2 and os.getpid() not in first
    ranks(1, pid)
    assert ranks(2, pid) == first


def test_a_failing_rank_is_named_first_with_its_traceback_and_the_others_stacks(ranks: Ranks) -> None:
    before = ranks(2, pid)
    with pytest.raises(RanksFailed) as caught:
        ranks(2, fail_on, 1)
    text = str(caught.value)
    assert (
        text.index("rank 1 of 2 failed first")
        < text.index("BatchError: bad batch on rank 1")
        < text.index("rank 0")
    )
    assert "in fail_on" in text.split("rank 0 of 2 still ran after another rank failed")[1]
    assert isinstance(caught.value.exceptions[1], BatchError)
    assert not set(ranks(2, pid)) & set(before)


def test_all_ranks_failures_are_listed_in_the_order_they_happened(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, fail_in_turn)
    text = str(caught.value)
    assert (
        text.index("rank 1 of 2 failed first") < text.index("rank 1 says no") < text.index("rank 0 says no")
    )
    assert set(caught.value.exceptions) == {0, 1}


@pytest.mark.parametrize(("how", "end"), [("exit", "exit status 7"), ("kill", "signal SIGKILL")])
def test_a_crashed_rank_is_named_and_replaced(ranks: Ranks, how: str, end: str) -> None:
    with pytest.raises(RanksFailed, match=rf"rank 1 of 2 failed first:\nthe process ended with {end}"):
        ranks(2, vanish, how)
    assert [value.item() for *_, value in ranks(2, total, 0)] == [1, 1]


def test_a_timeout_shows_every_ranks_stacks(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, hang_in_collective, timeout=0.5)
    first, second = str(caught.value).split("rank 1 of 2 still ran at the timeout of 0.5 s")
    assert "in barrier" in first and "in hang_in_collective" in first
    assert "in wait" in second and "in hang_in_collective" in second
    assert [value.item() for *_, value in ranks(2, total, 0)] == [1, 1]


def test_a_job_finds_no_trace_of_the_one_before(ranks: Ranks) -> None:
    fresh = ranks(2, surroundings)
    assert fresh[0][:4] == (1, torch.float32, True, 1)
    before = ranks(2, pid)
    ranks(2, leave_a_mess)
    assert ranks(2, surroundings) == fresh
    assert ranks(2, pid) == before


def test_ranks_without_their_process_group_are_replaced(ranks: Ranks) -> None:
    ranks(2, leave_the_group)
    assert [value.item() for *_, value in ranks(2, total, 0)] == [1, 1]


def test_deprecated_names_fail_a_job_unless_allowed(ranks: Ranks) -> None:
    assert ranks(1, warn_as_torch, deprecations="default") == ["went on"]
    with pytest.raises(RanksFailed, match="FutureWarning: old name"):
        ranks(1, warn_as_torch)


def test_a_result_that_cannot_be_sent_is_a_failure_not_a_hang(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        ranks(1, return_a_lambda)
