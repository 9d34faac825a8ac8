"""Worlds, one after the other in one process: a closed one leaves nothing, and others follow."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyreme
from conformance import axis_over
from polyreme.distributed.mesh import Mesh
from polyreme.distributed.process_group import close
from polyreme.distributed.watch import Watch
from polyreme.distributed.world import current
from polyreme.errors import ModelError, TransportError
from pool import Ranks

WIDTH = 16


def train(world: int, stage: int, kept: list[polyreme.Engine] | None = None) -> float:
    """The loss of a second step of an engine, which is closed, and `kept`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).double()
    config = {"batch": {"size": 4}, "zero": {"stage": stage, "min_bucket": 0}}
    config |= {"precision": {"compute": "fp64"}}  # type: ignore[dict-item]
    with polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss) as engine:
        assert engine.mesh.world_size == world
        if kept is not None:
            kept.append(engine)
        x = torch.ones(4 // world, WIDTH, dtype=torch.float64)
        return [engine.train_step((x, x)).loss for _ in range(2)][1]


def left() -> dict[str, object]:
    """What this process has of a world: its files and mappings, threads (gloo's, too) and groups."""
    gc.unfreeze()
    gc.collect()
    files = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    tasks = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    return {
        "heaps": [each for each in files if "memfd:polyreme" in each],
        "mappings": Path("/proc/self/maps").read_text().count("memfd:polyreme"),
        "threads": [each.name for each in threading.enumerate() if each is not threading.main_thread()],
        "gloo": [each for each in tasks if "gloo" in each],
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


NOTHING = {"heaps": [], "mappings": 0, "threads": [], "gloo": [], "groups": 0}


def cleared() -> dict[str, object]:
    """What is `left` where nothing is but the memory that jobs before this one in the same process still
    hold."""
    current().close()
    before = left()
    return NOTHING | {"heaps": before["heaps"], "mappings": before["mappings"]}


def two_worlds(rank: int, world: int, folder: Path) -> tuple[list[float], list[bool]]:
    """Train in a world of all, then in one of the first two or of the others, whose group is destroyed by
    hand, and in one of these ranks the other way round. Whether nothing is left of the first and the last."""
    nothing = cleared()
    losses, found = [train(world, 3)], []
    close()
    found.append(left() == nothing)
    for again in range(2):
        half, at = rank // 2, rank % 2
        meeting = f"file://{folder / f'meeting {half} {again}'}"
        dist.init_process_group("gloo", meeting, timedelta(minutes=1), 2, 1 - at if again else at)
        losses.append(train(2, 2 + again))
        dist.barrier()
        dist.destroy_process_group()
    close()
    found.append(left() == nothing)
    return losses, found


def test_a_world_follows_another_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for losses, found in ranks(4, two_worlds, tmp_path):
        assert found == [True] * 2
        assert max(losses) - min(losses) < 1e-12


def over_one_group(rank: int, world: int) -> None:
    """Worlds over a process group of the user's, which stays."""
    group, numbers = dist.group.WORLD, set()
    for shared in (True, False):
        mesh = Mesh.open({"dp": world}, shared_memory=shared)
        watch = current().of(Watch)
        numbers.add(int(dist.distributed_c10d._get_default_store().get(f"polyreme/worlds/{rank}")))
        mesh.dp.barrier()
        current().close()
        assert dist.group.WORLD is group and dist.distributed_c10d._world.pg_map.keys() == {group}
        assert current().of(Watch) is not watch
        for use in (mesh.dp.barrier, lambda mesh=mesh: mesh.dp.send(torch.ones(1), 1 - rank).wait()):
            with pytest.raises(TransportError, match=r"has closed the world.*open another engine"):
                use()
        dist.barrier()
    assert len(numbers) == 2


def test_a_process_group_of_the_users_outlives_worlds(ranks: Ranks) -> None:
    ranks(2, over_one_group)


def left_behind(rank: int, world: int, folder: Path) -> float:
    """What rank 1 reads of a message whose sender has closed its world."""
    dp, closed = Mesh.open({"dp": world}).dp, folder / "closed"
    numbers = torch.full((1 << 16,), 2.0)
    if rank == 0:
        for tensor in (numbers, dp.empty(numbers.numel(), numbers.dtype, numbers.device).copy_(numbers)):
            dp.send(tensor, 1)
        del tensor
        current().close()
        del dp
        gc.collect()
        closed.touch()
        return 2.0
    while not closed.exists():
        time.sleep(0.01)
    found = []
    for _ in range(2):
        dp.receive(numbers.zero_(), 0).wait()
        found.append(numbers.mean().item())
    return sum(found) / 2


def test_what_was_sent_before_the_end_arrives(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, left_behind, tmp_path) == [2.0, 2.0]


def by_environment(rank: int, world: int, ports: list[int]) -> tuple[list[float], list[dict[str, object]]]:
    """Worlds that Polyreme itself opens: of all, and of the first two and of the others, twice at one
    address; of the closed engines, whose weights lie in shared memory, nothing else is there."""
    dist.destroy_process_group()
    losses, found, kept = [], [], list[polyreme.Engine]()
    first, pair = [*range(world)], [rank // 2 * 2, rank // 2 * 2 + 1]
    for ranks, port in ((first, ports[0]), (pair, ports[1 + rank // 2]), (pair, ports[1 + rank // 2])):
        at, size = str(ranks.index(rank)), str(len(ranks))
        os.environ |= {"RANK": at, "LOCAL_RANK": at, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        losses.append(train(len(ranks), 2, kept))
        current().close()
        found.append(left())
        with pytest.raises(TransportError, match=r"has closed the world.*open another engine"):
            kept[-1].mesh.data.barrier()
    return losses, found


def test_worlds_of_the_environment(ranks: Ranks) -> None:
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
    for losses, found in ranks(4, by_environment, ports):
        for each in found:
            assert each.pop("heaps") and each.pop("mappings")
            assert each == {key: NOTHING[key] for key in each}
        assert max(losses) - min(losses) < 1e-12


def without_one(rank: int, world: int, folder: Path) -> tuple[str, float, bool]:
    """What ranks say when the last one leaves, what becomes of them without it, and whether nothing is
    left."""
    nothing = cleared()
    mesh, said = Mesh.open({"dp": world}), ""
    mesh.dp.barrier()
    if rank < world - 1:
        with pytest.raises(TransportError) as error:
            mesh.dp.barrier()
        said = str(error.value)
        del error
    del mesh
    close()
    dist.init_process_group(
        "gloo", f"file://{folder / str(rank // 2)}", timedelta(minutes=1), 2 - rank // 2, rank % 2
    )
    loss = train(2 - rank // 2, 2)
    close()
    return said, loss, left() == nothing


def test_ranks_go_on_without_one_that_left(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks(3, without_one, tmp_path)
    assert all("rank 2" in said for said, _, _ in answers[:2]), answers
    assert [found for _, _, found in answers] == [True] * 3
    assert max(loss for _, loss, _ in answers) - min(loss for _, loss, _ in answers) < 1e-12


def ended_meanwhile(rank: int, world: int, kind: str, by: str) -> None:
    """What threads wait for when their world is aborted or closed: a sum, and a message."""
    current().close()
    before, said = left(), list[str]()
    axis = axis_over(kind, rank, world)

    def wait(use: Callable[[], object]) -> None:
        with pytest.raises(TransportError) as error:
            use()
        said.append(str(error.value))

    if rank == 0:
        uses = (axis.barrier, lambda: axis.receive(torch.ones(1), 1).wait())
        threads = [threading.Thread(target=wait, args=(use,)) for use in uses]
        for each in threads:
            each.start()
        while kind != "process group" and len(current().of(Watch)._waits) < 2:
            time.sleep(0.01)
        if by == "abort":
            current().abort("a test ends it")
        current().close()
        for each in threads:
            each.join(100)
            assert not each.is_alive(), "it waits for the timeout of operations"
        why = "this process broke off .*, because a test ends it" if by == "abort" else "has closed the world"
        found = sorted(re.sub(f" over dp.* failed, because .*{why}.*", "", each) for each in said)
        assert found == ["all-reduce", "receive"], said
        with pytest.raises(TransportError, match="has closed the world"):
            axis.barrier()
        assert left() == before
    dist.barrier()
    current().close()


@pytest.mark.parametrize("by", ["abort", "close"])
@pytest.mark.parametrize("kind", ["shared memory", "gloo direct"])
def test_the_end_of_a_world_breaks_off_what_waits(ranks: Ranks, kind: str, by: str) -> None:
    ranks(2, ended_meanwhile, kind, by)


def test_a_world_of_groups_of_torchs_own_can_be_aborted(ranks: Ranks) -> None:
    ranks(2, ended_meanwhile, "process group", "abort")


def closed_afterwards(rank: int, world: int) -> None:
    """An engine whose world was closed first."""
    for stage in (0, 2, 3):
        model = nn.Linear(WIDTH, WIDTH)
        config = {"batch": {"size": 4}, "zero": {"stage": stage}}
        engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)
        x = torch.rand(2, WIDTH)
        engine.train_step((x, x))
        dist.barrier()
        current().close()
        engine.close()
        if stage == 3:  # what is known of parameters outlives the world
            with pytest.raises(ModelError, match=r"of parameter weight, whose engine is closed"):
                model.weight.sum()
        with pytest.raises(TransportError, match="has closed the world"):
            engine.mesh.data.barrier()
        dist.barrier()


def test_an_engine_is_closed_after_its_world(ranks: Ranks) -> None:
    ranks(2, closed_afterwards)
