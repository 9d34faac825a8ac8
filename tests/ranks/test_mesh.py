"""Collectives equal plain sums in rank order, to the last bit, at every size and dtype; and what they sent is
counted exactly."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import warnings
from collections.abc import Sequence
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import threads
from polyreme.distributed.mesh import AXES, SHORT, Axis, Mesh, SimulatedMesh, lines, names_apart
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.sums import CHUNK
from polyreme.errors import TransportError
from pool import Ranks, RanksFailed

SIZES = [0, 1, 7, 64, 1003, CHUNK + 5]
"""Elements of a shard; the last one is summed in two chunks."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@functools.lru_cache(maxsize=16)
def drawn(rank: int, size: int) -> Tensor:
    """Of very different magnitudes, so that another order of addition gives another sum."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 3, (size,), generator=generator)


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Those drawn, in that dtype, for the caller to change."""
    return drawn(rank, size).to(dtype, copy=True)


def in_order(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def collectives(rank: int, world: int, shared: list[bool]) -> None:
    """`shared` says which ranks keep what they send in memory that the others read."""
    axis = Mesh.open({"dp": world}, shared_memory=any(shared)).dp
    assert (axis.name, axis.size, axis.rank) == ("dp", world, rank)
    reads = world > 1 and any(shared) and heap() is not None
    assert (axis.backend.kind == "shared memory") == reads

    def placed(tensor: Tensor) -> Tensor:
        return (
            axis.empty(tensor.numel(), tensor.dtype, tensor.device).copy_(tensor)
            if shared[rank]
            else tensor.clone()
        )

    for size in SIZES:
        for dtype in DTYPES:
            everyone = [numbers(r, size, dtype) for r in range(world)]
            full = torch.full((world * size,), float("nan"), dtype=dtype)
            # whose input nobody here holds while others read it
            axis.all_gather(full, placed(everyone[rank])).wait()
            assert torch.equal(full, torch.cat(everyone)), ("all_gather", size, dtype)
            full = placed(torch.full((world * size,), float("nan"), dtype=dtype))
            own = full[rank * size : (rank + 1) * size]
            own.copy_(everyone[rank])
            work = axis.all_gather(full, own)  # in place
            work.wait()
            work.wait()
            assert torch.equal(full, torch.cat(everyone)), ("in place", size, dtype)

            fulls = [numbers(r, world * size, dtype) for r in range(world)]
            mine = [f[rank * size : (rank + 1) * size] for f in fulls]
            for out_dtype in {dtype, torch.float32, torch.float64} if dtype.itemsize < 8 else {dtype}:
                out = torch.full((size,), float("nan"), dtype=out_dtype)
                axis.reduce_scatter(out, placed(fulls[rank])).wait()
                wanted = in_order(mine, out_dtype)
                assert torch.equal(out, wanted), ("reduce_scatter", size, dtype, out_dtype)
                full = placed(fulls[rank])
                axis.reduce_scatter(out, full, accumulate=True).settle()
                full.fill_(float("nan"))  # nobody reads it any more
                assert torch.equal(out, wanted + wanted), ("accumulate", size, dtype, out_dtype)
            full = placed(fulls[rank])
            axis.reduce_scatter(full[rank * size : (rank + 1) * size], full).wait()  # in place
            assert torch.equal(full[rank * size : (rank + 1) * size], in_order(mine, dtype)), (
                "in place",
                size,
                dtype,
            )

            tensor = everyone[rank].clone()
            axis.all_reduce(tensor).wait()
            assert torch.equal(tensor, in_order(everyone, dtype)), ("all_reduce", size, dtype)
    several = [(torch.empty(world * 2000), placed(numbers(rank, 2000, torch.float32) + i)) for i in range(6)]
    works = [axis.all_gather(full, shard) for full, shard in several]
    for work in reversed(works):  # many at a time, in any order of waiting
        work.wait()
    for i, (full, _) in enumerate(several):
        assert torch.equal(full, torch.cat([numbers(r, 2000, torch.float32) + i for r in range(world)]))


@pytest.mark.parametrize(("world", "shared"), [(1, "all"), (2, "all"), (2, "none"), (4, "some"), (4, "none")])
def test_collectives_are_sums_in_rank_order(ranks: Ranks, world: int, shared: str) -> None:
    """With no deprecated name of torch among them (the pool makes each warning an error)."""
    ranks(
        world, collectives, [shared == "all" or (shared == "some" and rank % 2 == 1) for rank in range(world)]
    )


def reading_late(rank: int, world: int) -> None:
    axis = Mesh.open({"dp": world}).dp
    full = torch.empty(world * 5000)
    mine = axis.empty(5000, torch.float32, torch.device("cpu")).fill_(rank + 1.0)
    work = axis.all_gather(full, mine)
    if rank == 0:
        del mine
        work.wait()
        del work, axis  # before the others have read it
        gc.collect()
        dist.barrier()
    else:
        dist.barrier()
        work.wait()
    assert torch.equal(full.view(world, -1)[:, 0], torch.arange(1.0, world + 1))


@pytest.mark.parametrize("world", [2, 4])
def test_memory_that_others_still_read_stays(ranks: Ranks, world: int) -> None:
    ranks(world, reading_late)


def broadcasts(rank: int, world: int) -> None:
    axis = Mesh.open({"dp": world}).dp
    for source in range(world):
        for made in (
            torch.tensor(1.5),
            torch.arange(3),
            torch.ones(2, 3, dtype=torch.bfloat16),
            torch.tensor([True, False]),
            torch.ones(2, dtype=torch.complex64),
            torch.ones(3, dtype=torch.int8),
            torch.empty(0, 2),
            torch.ones(4).to(torch.float8_e4m3fn),
            torch.ones(2, dtype=torch.uint16),
        ):
            tensor = made.clone() if rank == source else torch.zeros_like(made)
            axis.broadcast(tensor, source)
            assert tensor.dtype == made.dtype and torch.equal(
                tensor.view(-1).view(torch.uint8), made.view(-1).view(torch.uint8)
            ), made
    # of the text in JSON, in quotes; within one exchange, and beyond
    for longest in (0, SHORT, SHORT + 1, 100_000):
        texts = ["x" * max(longest * (r + 1) // world - 2, 0) for r in range(world)]
        assert axis.gather_objects(texts[rank]) == texts
    assert axis.gather_objects({"rank": rank}) == [{"rank": r} for r in range(world)]
    axis.barrier()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_broadcast_any_dtype_and_gather_objects(ranks: Ranks, world: int) -> None:
    ranks(world, broadcasts)


def counting(rank: int, world: int) -> dict[str, dict[str, tuple[int, int]]]:
    mesh = Mesh.open({"dp": world})
    full = torch.ones(world * 10)
    mesh.dp.all_gather(full, torch.ones(10)).wait()
    mesh.dp.all_gather(full.bfloat16(), torch.ones(10).bfloat16()).wait()
    # counted as sent: in float16
    mesh.dp.reduce_scatter(torch.zeros(10, dtype=torch.float64), full.half()).wait()
    mesh.dp.all_reduce(torch.ones(3, dtype=torch.float64)).wait()
    mesh.dp.broadcast(torch.ones(5))
    mesh.dp.all_gather(torch.empty(0), torch.empty(0)).wait()
    return mesh.traffic()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_counters_are_exact(ranks: Ranks, world: int) -> None:
    for rank, traffic in enumerate(ranks(world, counting)):
        others = world - 1
        expected = {
            "all_gather": (2, others * (40 + 20)),
            "reduce_scatter": (1, others * 20),
            "all_reduce": (1, others * 24),
            "broadcast": (1, 20 if rank == 0 else 0),
        }
        assert traffic == ({"dp": expected} if others else {})


def two_axes(rank: int, world: int, order: tuple[str, ...]) -> dict[str, tuple[int, list[Any]]]:
    mesh = Mesh.open({"dp": 2, "tp": 2}, order)
    assert (mesh.rank, mesh.world_size) == (rank, world)
    assert [getattr(mesh, name).size for name in AXES] == [2 if name in ("dp", "tp") else 1 for name in AXES]
    found = {}
    for axis in (mesh.dp, mesh.tp, mesh.pp):
        summed = torch.tensor([float(rank)])
        axis.all_reduce(summed).wait()
        members = axis.gather_objects(rank)
        assert summed.item() == sum(members)
        found[axis.name] = (axis.rank, members)
    assert mesh.dp.counts["all_reduce"].bytes == 4 and "all_reduce" not in mesh.pp.counts
    with pytest.raises(AttributeError, match="no axis 'xp'"):
        mesh.xp  # noqa: B018
    return found


def parts(rank: int, world: int, members: list[int]) -> None:
    """A sum over a part of an axis sends its numbers only where the mesh does not share memory."""
    messages: list[int] = []
    isend = dist.isend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist,
            "isend",
            lambda tensor, *args, **named: messages.append(tensor.nbytes) or isend(tensor, *args, **named),
        )
        for shared in (True, False):
            mesh = Mesh.open({"pp": world}, shared_memory=shared)
            part = mesh.among("pp", members)
            assert (part.size, part.rank) == (
                (len(members), members.index(rank)) if rank in members else (1, 0)
            )
            messages.clear()
            summed = torch.full((5000,), rank + 1.0)
            part.all_reduce(summed).settle()
            assert summed.unique().tolist() == [sum(r + 1 for r in members) if rank in members else rank + 1]
            assert messages == ([20_000] * (part.size - 1) if not shared or heap() is None else [])
            assert mesh.traffic().get("pp", {}).get("all_reduce") == (
                (1, 20_000 * (part.size - 1)) if rank in members else None
            )


@pytest.mark.parametrize(("world", "members"), [(2, [0, 1]), (4, [0, 1, 3])])
def test_parts_of_an_axis_share_memory_as_the_mesh_does(ranks: Ranks, world: int, members: list[int]) -> None:
    ranks(world, parts, members)


@pytest.mark.parametrize("order", [AXES, ("tp", "pp", "cp", "ep", "dp")])
def test_two_axes(ranks: Ranks, order: tuple[str, ...]) -> None:
    neighbours = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    strided = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    inner, outer = ("tp", "dp") if order.index("tp") > order.index("dp") else ("dp", "tp")
    for rank, found in enumerate(ranks(4, two_axes, order)):
        assert found == {
            inner: (rank % 2, neighbours[rank]),
            outer: (rank // 2, strided[rank]),
            "pp": (0, [rank]),
        }


def products(rank: int, world: int, order: tuple[str, ...]) -> None:
    """An axis over several axes has all collectives of its own, as those simulated have."""
    sizes = {"dp": 2, "tp": world // 4, "pp": 2}
    mesh = Mesh.open(sizes, order)
    simulated = SimulatedMesh.of(sizes, order, rank, torch.device("cpu"))
    for names in (
        ("dp", "tp"),
        ("pp", "loss"),
        ("data", "cp"),
        ("tp", "pp"),
        ("pp", "dp", "tp"),
        ("cp", "ep"),
    ):
        axis, planned = mesh.axis(*names), simulated.axis(*names)
        assert axis is mesh.axis(*names[::-1])
        assert (axis.name, axis.size, axis.rank) == (planned.name, planned.size, planned.rank)
        members = next((line for line in mesh.lines(*names) if rank in line), [rank])
        assert axis.gather_objects(rank) == members == sorted(members)
        out, full = torch.empty(3), torch.arange(3.0 * axis.size) + rank
        axis.reduce_scatter(out, full).wait()
        ranks = float(sum(members))
        assert torch.equal(out, axis.size * (torch.arange(3.0) + 3 * axis.rank) + ranks)
        whole = torch.empty(axis.size)
        axis.all_gather(whole, torch.tensor([float(rank)])).wait()
        assert whole.tolist() == members
    assert mesh.data is mesh.loss is mesh.shard is mesh.dp
    assert mesh.world.gather_objects(rank) == [*range(world)] == mesh.gather_objects(rank)
    pairs = [each.split("loss", 1, ("alone", "others")) for each in (mesh, simulated)]
    assert [[(a.name, a.size, a.rank) for a in pair] for pair in pairs] == [
        [("alone", 1, 0), ("others", 2, mesh.dp.rank)]
    ] * 2
    assert mesh.places(rank) == {"loss": mesh.dp.rank, "tp": mesh.tp.rank, "pp": mesh.pp.rank}
    assert {*mesh.traffic()} >= {"pp x dp x tp" if world > 4 else "pp x dp"}


@pytest.mark.parametrize("order", [AXES, ("tp", "pp", "cp", "ep", "dp")])
@pytest.mark.parametrize("world", [4, 8])
def test_several_axes_are_one(ranks: Ranks, world: int, order: tuple[str, ...]) -> None:
    (ranks if world == 4 else threads.run)(world, products, order)


def halves(rank: int, world: int) -> None:
    mesh = Mesh.open({"dp": world})
    near, far = mesh.split("loss", 2, ("near", "far"))
    assert near.gather_objects(rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert far.gather_objects(rank) == [rank % 2, rank % 2 + 2]
    assert mesh.split("loss", 2, ("near", "far")) == (near, far)
    near.barrier()
    assert mesh.traffic() == {"near": {"all_reduce": (1, 4)}}


def test_an_axis_is_split_into_two(ranks: Ranks) -> None:
    ranks(4, halves)


def test_machines_with_the_same_name_are_told_apart() -> None:
    assert names_apart([("a", "1"), ("a", "1"), ("b", "2")]) == ["a", "a", "b"]
    assert names_apart([("a", "123456789"), ("a", "2"), ("b", "2")]) == ["a (12345678)", "a (2)", "b"]


def test_lines_partition_the_ranks() -> None:
    for order in permutations(AXES, 5):
        sizes = {"pp": 2, "dp": 3, "tp": 4}
        members = {name: lines(sizes, order, name) for name in AXES}
        for name in AXES:
            assert sorted(chain(*members[name])) == list(range(24))
            assert {len(line) for line in members[name]} == {sizes.get(name, 1)}
        for one in members["dp"]:  # two axes' lines have one rank in common at most
            assert all(len({*one} & {*other}) <= 1 for other in members["tp"])
        innermost = [name for name in order if name in sizes][-1]
        assert members[innermost][0] == list(range(sizes[innermost]))


def wrong_size(rank: int, world: int) -> str:
    with pytest.raises(TransportError) as caught:
        Mesh.open({"dp": world + 1})
    return str(caught.value)


def test_sizes_that_do_not_make_the_world(ranks: Ranks) -> None:
    assert "make 3 ranks, but there are 2" in ranks(2, wrong_size)[0]


def with_a_dead_peer(rank: int, world: int, operation: str, folder: Path) -> None:
    axis = Mesh.open({"dp": world}).dp
    axis.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):  # what is sent first may still find room in a buffer
            if operation == "all_gather":
                axis.all_gather(torch.empty(world * 10), torch.ones(10)).wait()
            elif operation == "reduce_scatter":
                axis.reduce_scatter(torch.empty(10), torch.ones(world * 10)).wait()
            elif operation == "all_reduce":
                axis.all_reduce(torch.ones(3)).wait()
            elif operation == "broadcast":
                axis.broadcast(torch.ones(3), source=1)
            elif operation == "reading":  # where rank 1 has it
                axis.all_gather(torch.empty(world * 5000), torch.ones(5000)).wait()
            else:
                axis.gather_objects(rank)
    except TransportError as error:
        (folder / f"{operation}-{rank}").write_text(str(error))
        raise


@pytest.mark.parametrize(
    "operation", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "gather_objects"]
)
def test_a_dead_peer_is_an_error_and_no_hang(ranks: Ranks, operation: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks(2, with_a_dead_peer, operation, tmp_path)
    shared = operation == "all_reduce" and heap() is not None
    said = "rank 1 of axis dp ended" if shared else f"rank 1 on {socket.gethostname()} did not come to it"
    assert said in (tmp_path / f"{operation}-0").read_text()


def test_of_many_ranks_the_dead_one_is_named_at_once(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks(3, with_a_dead_peer, "reduce_scatter", tmp_path)
    said = [(tmp_path / f"reduce_scatter-{rank}").read_text() for rank in (0, 2)]
    assert all(f"rank 1 on {socket.gethostname()} " in each for each in said), said


@pytest.mark.skipif(heap() is None, reason="this system has no memory to share")
def test_a_dead_peer_whose_memory_is_read_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks(2, with_a_dead_peer, "reading", tmp_path)
    said = (tmp_path / "reading-0").read_text()
    assert said.startswith("all-gather over dp (5000 torch.float32) failed, because rank 1 ")
    assert "rank 1 of axis dp ended" in said


def test_one_process_needs_no_group() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = Mesh.open({"dp": 1})
    assert not dist.is_initialized() and (mesh.rank, mesh.world_size) == (0, 1)
    out = torch.zeros(3)
    mesh.dp.reduce_scatter(out, torch.ones(3, dtype=torch.bfloat16), accumulate=True).wait()
    assert out.tolist() == [1, 1, 1] and repr(Axis("dp")) == "Axis('dp', size=1, rank=0)"
