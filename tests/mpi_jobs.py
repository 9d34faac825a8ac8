"""What ranks that mpirun started do in tests: torch's own functions over MPI, and exchanges between hosts."""

from __future__ import annotations

import os
from functools import reduce
from operator import or_, xor
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import breaks_off, conforms
from polyreme.distributed import gloo_direct
from polyreme.distributed.across_hosts import AcrossHosts
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.distributed.mpi_group import MpiGroup
from polyreme.distributed.process_group import groups

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
SUMS = (
    (torch.float32, torch.float32, False), (torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, False), (torch.float64, torch.float32, False),
    (torch.float64, torch.float32, True),
)  # fmt: skip
"""What is summed: its dtype, the sum's, and whether it is added to what there is."""


def sums(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for size in (1, 7, 50_001):
            whole = torch.full((size,), rank + 1).to(dtype)
            dist.all_reduce(whole)
            assert torch.equal(whole, torch.full((size,), world * (world + 1) // 2).to(dtype)), (dtype, size)
    # eight bits are not enough for the sum on the way
    parts = torch.full((world,), 257.0 if rank else -256.0).to(torch.bfloat16)
    dist.all_reduce(parts)
    assert parts[0] == torch.tensor(256.0 * (world - 1) - 256).to(torch.bfloat16)
    turned = torch.full((5, 3), float(rank)).t()  # not contiguous
    dist.all_reduce(turned, op=dist.ReduceOp.AVG)
    assert turned.eq((world - 1) / 2).all()
    expected = {
        "MAX": world, "MIN": 1, "PRODUCT": torch.arange(1, world + 1).prod(), "AVG": (world + 1) // 2,
        "BAND": 0, "BOR": reduce(or_, range(1, world + 1)), "BXOR": reduce(xor, range(1, world + 1)),
    }  # fmt: skip
    for name, value in expected.items():
        number = torch.full((3,), rank + 1)
        dist.all_reduce(number, op=getattr(dist.ReduceOp, name))
        assert number.eq(value).all(), name
    to_one = torch.full((3,), float(rank))
    dist.reduce(to_one, dst=1)
    assert to_one.eq(world * (world - 1) / 2 if rank == 1 else rank).all()
    several = [torch.ones(3), torch.ones(50_000)]
    dist.group.WORLD.allreduce_coalesced(several, dist.AllreduceCoalescedOptions()).wait()
    assert all(each.eq(world).all() for each in several)


def gathers(rank: int, world: int) -> None:
    mine, everyone = torch.full((2, 3), float(rank)), [torch.empty(2, 3) for _ in range(world)]
    dist.all_gather(everyone, mine)
    assert all(each.eq(source).all() for source, each in enumerate(everyone))
    whole = torch.empty(world * 4, dtype=torch.bfloat16)
    dist.all_gather_single(whole, torch.full((4,), rank, dtype=torch.bfloat16))
    assert whole.view(world, 4).T.eq(torch.arange(world)).all()
    dist.all_gather_single(whole, whole[4 * rank : 4 * rank + 4])  # in place
    assert whole.view(world, 4).T.eq(torch.arange(world)).all()
    at_one = [torch.empty(3) for _ in range(world)] if rank == 1 else None
    dist.gather(torch.full((3,), float(rank)), at_one, dst=1)
    assert all(each.eq(source).all() for source, each in enumerate(at_one or []))
    part = torch.empty(3)
    dist.scatter(part, [torch.full((3,), float(to)) for to in range(world)] if rank == 0 else None)
    assert part.eq(rank).all()
    dist.broadcast(part, src=1)
    assert part.eq(1).all()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": source} for source in range(world)]
    told = ["x", {"y": 2}] if rank == 0 else [None, None]
    dist.broadcast_object_list(told)
    assert told == ["x", {"y": 2}]
    dist.barrier()


def scatters(rank: int, world: int) -> None:
    shard = torch.empty(4, dtype=torch.bfloat16)
    dist.reduce_scatter_single(shard, torch.ones(4 * world, dtype=torch.bfloat16))
    assert shard.eq(world).all()
    part = torch.empty(4)
    dist.reduce_scatter(part, [torch.full((4,), float(to)) for to in range(world)])
    assert part.eq(world * rank).all()
    row = torch.empty(world)
    dist.all_to_all_single(row, torch.arange(world) + 10.0 * rank)
    assert row.tolist() == [10.0 * source + rank for source in range(world)]
    places = [torch.empty(source + rank) for source in range(world)]  # of many sizes, and none
    dist.all_to_all(places, [torch.full((to + rank,), float(rank)) for to in range(world)])
    assert all(each.eq(source).all() for source, each in enumerate(places))
    uneven = torch.empty(sum(source + rank for source in range(world)))
    sizes = [rank + other for other in range(world)]
    dist.all_to_all_single(uneven, torch.full((sum(sizes),), float(rank)), sizes, sizes)
    assert torch.equal(uneven, torch.cat(places))


def messages(rank: int, world: int) -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    sending = [dist.isend(torch.full((9,), tag + rank), after, tag=tag) for tag in (3, 4)]
    for tag in (4, 3):  # in another order than they were sent
        got = torch.empty(9, dtype=torch.int64)
        dist.irecv(got, before, tag=tag).wait()
        assert got.eq(tag + before).all()
    for each in sending:
        each.wait()
    if rank == 0:
        got = torch.empty(2)
        assert sorted(dist.recv(got, tag=7) for _ in range(world - 1)) == list(range(1, world))
    else:
        dist.send(torch.ones(2), 0, tag=7)
    got = torch.empty(3)
    both = [dist.P2POp(dist.isend, torch.ones(3), after), dist.P2POp(dist.irecv, got, before)]
    for each in dist.batch_isend_irecv(both):
        each.wait()
    assert got.eq(1).all()
    pair = dist.new_group([0, 1])
    if rank < 2:
        number = torch.full((50_000,), rank + 1)
        dist.all_reduce(number, group=pair)
        assert number.eq(3).all() and dist.get_rank(pair) == rank
        dist.destroy_process_group(pair)
    alone = [dist.new_group([each]) for each in range(world)][rank]
    dist.all_reduce(number := torch.full((50_000,), 2.5), group=alone)
    assert number.eq(2.5).all()


def ended(rank: int, world: int, kind: str) -> None:
    """What a backend over MPI breaks off, and others that can hear of it."""
    groups().opened = False  # the process group stays, for backends of other kinds
    assert dist.get_backend() == "cpu:mpi"
    breaks_off(rank, world, kind, kind == "shared memory")


def goes_on(rank: int, world: int) -> None:
    """Operations end while nobody asks MPI, as their futures tell; and in whichever order they are waited
    for."""
    numbers = [torch.full((size,), float(rank)) for size in (10, 200_000, 50_000, 3)]
    works = [dist.all_reduce(each, async_op=True) for each in numbers]
    told = works[1].get_future().then(lambda future: future.value()[0][0] + 1)
    assert told.wait() == world * (world - 1) / 2 + 1  # in C++, which looks for nothing
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all(each.eq(world * (world - 1) / 2).all() for each in numbers)


def data_parallel(rank: int, world: int) -> None:
    from torch.nn.parallel import DistributedDataParallel  # whose first one takes a second of imports

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10)), bucket_cap_mb=0.01
    )
    inputs = torch.randn(world, 4, 100)
    model(inputs[rank]).sum().backward()
    plain = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    plain.load_state_dict(model.module.state_dict())
    plain(inputs).sum().div(world).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def fully_sharded(rank: int, world: int) -> None:
    """What finds groups by their names: functional collectives, meshes of devices, FSDP2."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    summed = functional.all_reduce(torch.full((3,), float(rank)), "sum", dist.group.WORLD)
    assert summed.eq(world * (world - 1) / 2).all()
    plain, model = (
        nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)),
        nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)),
    )
    model.load_state_dict(plain.state_dict())
    for each in (*model, model):
        fully_shard(each)
    inputs = torch.randn(world, 4, 7)
    plain(inputs).sum().div(world).backward()
    model(inputs[rank]).sum().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(own.grad, DTensor)
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)


def on_hosts(rank: int, world: int, hosts: int) -> None:
    """Ranks that read the memory of no others than some neighbours', as on several hosts: what crosses the
    network is as little as can be, and sums are those of one host."""
    one, pids, each = Mesh.open({"dp": world}).dp, [None] * world, world // hosts
    dist.all_gather_object(pids, os.getpid())
    host, found = rank // each, gloo_direct.open_peer
    near = pids[host * each : (host + 1) * each]
    with patch.object(gloo_direct, "open_peer", lambda pid, *way: found(pid, *way) if pid in near else None):
        conforms(rank, world, "shared memory")
        axis = Mesh.open({"dp": world}).dp
    assert isinstance(axis.backend, AcrossHosts)
    assert axis.backend._hosts == [[*range(start, start + each)] for start in range(0, world, each)]
    gathers_in_any_order(axis)
    sums_in_parts(one, Mesh.open({"dp": world}, shared_memory=False).dp)
    uneven = pids[:-1] if rank < world - 1 else pids[-1:]
    with patch.object(
        gloo_direct, "open_peer", lambda pid, *way: found(pid, *way) if pid in uneven else None
    ):
        sums_in_parts(one, Mesh.open({"dp": world}).dp)
    sent, real = [0], MpiGroup.sending

    def counting(group: MpiGroup, flat: Tensor, to: int, tag: int) -> Any:
        sent[0] += flat.nbytes * (to // each != host)
        return real(group, flat, to, tag)

    with patch.object(MpiGroup, "sending", counting):
        sums_as_on_one_host(axis, one, hosts, sent)


def sums_in_parts(one: Axis, axis: Axis) -> None:
    """With the bits of axis `one`, in whichever order sums are waited for."""
    begun = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        numbers = torch.randn(50_003, generator=torch.manual_seed(10 * number + one.rank)).to(dtype)
        one.all_reduce(expected := numbers.clone()).settle()
        begun.append((axis.all_reduce(numbers), numbers, expected))
    for work, found, expected in begun if one.rank % 2 else begun[::-1]:
        work.settle()
        assert torch.equal(found, expected)


def gathers_in_any_order(axis: Axis) -> None:
    """Parts come whole, whoever waits for what first."""
    begun, rank, world = [], axis.rank, axis.size
    for number in range(6):
        shard = torch.full((5000 + number,), 10.0 * number + rank)
        shard = axis.empty(shard.numel(), shard.dtype, shard.device).copy_(shard) if number % 2 else shard
        whole = torch.empty(world * shard.numel())
        begun.append((axis.all_gather(whole, shard, f" {number}"), whole, number))
    for work, whole, number in begun if rank % 2 else begun[::-1]:
        work.wait()
        expected = (10.0 * number + torch.arange(world)).repeat_interleave(5000 + number)
        assert torch.equal(whole, expected)
    for work, _, _ in begun:
        work.settle()


def sums_as_on_one_host(axis: Axis, one: Axis, hosts: int, sent: list[int]) -> None:
    """With the bits of axis `one`, and as many bytes `sent` to other hosts as it takes."""
    world, each, part = axis.size, axis.size // hosts, 400_003 // axis.size
    begun, expected = [], []
    for number, (dtype, wide, add) in enumerate(SUMS):
        numbers = torch.randn(world * part, generator=torch.manual_seed(10 * number + axis.rank)).to(dtype)
        full = axis.empty(numbers.numel(), dtype, numbers.device) if number % 2 else torch.empty_like(numbers)
        outs = torch.ones(2, part, dtype=wide)
        one.reduce_scatter(outs[0], numbers, add).settle()
        one.all_reduce(whole := numbers.clone()).settle()
        expected += [outs[0], whole]
        begun.append((axis.reduce_scatter(outs[1], full.copy_(numbers), add), outs[1]))
        again = axis.empty(numbers.numel(), dtype, numbers.device) if number % 2 else numbers.clone()
        begun.append((axis.all_reduce(again.copy_(numbers)), again))
    for work, _ in begun if axis.rank % 2 else begun[::-1]:
        work.wait()
    for (work, total), right in zip(begun, expected, strict=True):
        work.settle()
        assert torch.equal(total, right)
    parts = 0
    for dtype, wide, _ in SUMS:
        chained = hosts * wide.itemsize < (hosts - 1) * each * dtype.itemsize
        sends = (hosts + 1) * wide.itemsize if chained else world * dtype.itemsize
        parts += (hosts - 1) * sends * each  # of a reduce-scatter
        parts += 2 * (hosts - 1) * world * dtype.itemsize  # of an all-reduce
    counted = torch.tensor(sent)
    dist.all_reduce(counted)
    assert counted == parts * part
