"""Ranks that go on without some of them, or with new ones, in the same processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_world import NOTHING, left
from torch import nn

import polyreme
from examples import whole
from polyreme.distributed import rendezvous
from polyreme.distributed.mesh import Mesh
from polyreme.distributed.process_group import close, reopen
from polyreme.distributed.world import current
from polyreme.errors import LaunchError, TransportError
from polyreme.launch.processes import die_with_parent
from pool import forkserver

WIDTH, SAMPLES = 16, 12
SECONDS = 200


def begin(world: int, shared: bool = True) -> tuple[polyreme.Engine, Callable[[], float]]:
    """An engine, and its step on the same samples whatever the world."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).double()
    config = {"batch": {"size": SAMPLES}, "zero": {"stage": 3, "min_bucket": 0}}
    config |= {"precision": {"compute": "fp64"}, "mesh": {"shared_memory": shared}}  # type: ignore[dict-item]
    engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)
    assert engine.mesh.world_size == world
    x = torch.ones(SAMPLES // world, WIDTH, dtype=torch.float64)
    return engine, lambda: engine.train_step((x, x)).loss


def train(world: int) -> float:
    """The loss of a second step."""
    engine, step = begin(world)
    with engine:
        return [step() for _ in range(2)][1]


def works(rank: int, world: int) -> float:
    """What training gives in a world whose every axis moves tensors."""
    for name in ("dp", "tp", "pp", "cp") if world > 1 else ():
        axis = Mesh.open({name: world}).axes[name]
        assert (axis.size, axis.rank) == (world, rank)
        for size in (3, 70_000):
            numbers = torch.full((size,), rank + 1.0)
            axis.all_reduce(numbers).settle()
            assert numbers.eq(world * (world + 1) / 2).all()
            axis.all_gather(whole := torch.empty(world * size), torch.full((size,), float(rank))).settle()
            assert whole.view(world, size).T.eq(torch.arange(world)).all()
        sending = axis.send(torch.full((9,), float(rank)), (rank + 1) % world)
        axis.receive(got := torch.empty(9), (rank - 1) % world).wait()
        sending.settle()
        assert got.eq((rank - 1) % world).all()
    return train(world)


def tell(rank: int, world: int, port: int) -> None:
    """Say which rank this process is, as a launcher does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def files() -> Counter[str]:
    """What this process has open, sockets by their number."""
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return Counter(str(each).partition(":")[0] for each in links)


def nothing_left(before: Counter[str]) -> None:
    close()
    assert left() == NOTHING
    rendezvous._stores.clear()  # which outlives worlds
    opened = files() - before
    assert opened in (Counter(), Counter(pipe=2)), opened  # the store's library has one pipe for a process


def without(rank: int, world: int, dies: int, shared: bool, ports: Sequence[int]) -> list[float]:
    """Lose one rank in the middle of sums, and then another one, which is left out."""
    before = files()
    tell(rank, world, ports[0])
    engine, step = begin(world, shared)
    losses = [[step() for _ in range(2)][1]]
    axis = Mesh.open({"dp": 2, "tp": 2}, shared_memory=shared).world
    if rank == dies:
        axis.all_reduce(torch.ones(50_000))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError, match="all-reduce over dp x tp"):
        for _ in range(100):
            axis.all_reduce(torch.ones(50_000)).wait()
    first = current()
    first.abort(f"rank {dies} was killed")
    with pytest.raises(TransportError):
        step()
    engine.close()
    del axis, engine, step
    left_over = [each for each in range(world) if each != dies]
    if dies == 0:
        with pytest.raises(LaunchError, match=r"ranks \[1, 2, 3\] .* cannot meet at .*give the address"):
            reopen(first, left_over)
    assert reopen(first, left_over, None if dies else ("127.0.0.1", ports[1]))
    losses.append(works(left_over.index(rank), len(left_over)))
    if reopen(current(), [0, 2]):
        losses.append(works([0, 2].index(left_over.index(rank)), 2))
        if current().rank == 0:  # the other one does not call
            with pytest.raises(TransportError, match="rank 1 of 2 did not come to the meeting"):
                reopen(current(), [0, 1], within=timedelta(seconds=2))
    else:
        assert left_over.index(rank) == 1
    nothing_left(before)
    return losses


def more(rank: int, world: int, ports: Sequence[int]) -> list[float]:
    """Two ranks, which two new ones join, one of which becomes the first; then there is one."""
    before, losses, new = files(), list[float](), [None, 1, None, 0]
    tell(rank, 2 if rank < 2 else world, ports[rank // 2])
    if rank < 2:
        losses.append(works(rank, 2))
        with pytest.raises(LaunchError, match=r"of which new ranks .* know nothing"):
            reopen(current(), [0, 1, None])
        assert reopen(current(), new, ("127.0.0.1", ports[1]))
        rank = new.index(rank)
    else:
        tell(rank := 0 if rank == 2 else 2, world, ports[1])
    losses.append(works(rank, world))
    if reopen(current(), [1]):
        losses.append(works(0, 1))
    nothing_left(before)
    return losses


def over_a_group_of_the_users(rank: int, world: int, folder: Path, ports: Sequence[int]) -> list[float]:
    """Two of the ranks of a process group that the script opened, the other way round."""
    before = files()
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    losses = [train(world)]
    with pytest.raises(LaunchError, match="give the address"):
        reopen(current(), [0, 1])
    current().close()  # and nothing is known of the next one but the process group
    if reopen(current(), [2, 0], ("127.0.0.1", ports[0])):
        losses.append(works([2, 0].index(rank), 2))
    nothing_left(before)
    return losses


def live(function: Callable[..., Any], args: tuple[Any, ...], connection: Connection) -> None:
    """All that a process of these tests does."""
    die_with_parent()
    torch.set_num_threads(1)
    connection.send(function(*args))


@contextlib.contextmanager
def processes(function: Callable[..., Any], *args: Any) -> Iterator[list[Any]]:
    """What four processes of their own answer; None of one that ended without."""
    context, started, answers = forkserver(), [], list[Any]()
    try:
        for rank in range(4):
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(function, (rank, 4, *args), theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        for process, ours in started:
            try:
                answers.append(ours.recv() if ours.poll(SECONDS) else "late")
            except EOFError:
                process.join(10)
                answers.append(process.exitcode)
        yield answers
    finally:
        for process, ours in started:
            process.kill()
            process.join(10)
            ours.close()


def ports(count: int) -> list[int]:
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def alike(losses: Sequence[float]) -> bool:
    return max(losses) - min(losses) < 1e-12


@pytest.mark.parametrize(("dies", "shared"), [(3, True), pytest.param(0, True, marks=whole), (3, False)])
def test_ranks_go_on_without_one_that_was_killed(dies: int, shared: bool) -> None:
    with processes(without, dies, shared, ports(2)) as answers:
        assert answers.pop(dies) == -signal.SIGKILL
        assert [len(losses) for losses in answers] == [3, 2, 3], answers
        assert alike([*chain(*answers)])


def test_new_ranks_join_those_that_are_there() -> None:
    with processes(more, ports(2)) as answers:
        assert [len(losses) for losses in answers] == [2, 3, 1, 1], answers
        assert alike([*chain(*answers)])


def test_ranks_of_the_users_process_group_can_be_others(tmp_path: Path) -> None:
    with processes(over_a_group_of_the_users, tmp_path, ports(1)) as answers:
        assert [len(losses) for losses in answers] == [2, 1, 2, 1], answers
        assert alike([*chain(*answers)])
