"""DeepSpeed's collectives on real ranks: their results, and the record of what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.comm.coalesced import reduce_scatter_coalesced
from polyreme.compat.deepspeed.utils import groups
from polyreme.compat.deepspeed.utils import logging as ds_logging
from pool import Ranks


def collectives(rank: int, world: int) -> dict[str, Any]:
    """What each collective left on this rank."""
    dist.init_distributed()
    mine, found = torch.tensor([rank + 1.0, 10.0 * rank]), dict[str, Any]()

    def out(n: int = 2) -> torch.Tensor:
        return torch.zeros(n)

    dist.all_reduce(total := mine.clone())
    dist.all_reduce(largest := mine.clone(), op=dist.ReduceOp.MAX)
    work = dist.all_reduce(later := mine.clone(), async_op=True)
    work.wait()
    dist.all_reduce_coalesced([a := mine.clone(), b := mine[:1].clone()])
    dist.inference_all_reduce(inferred := mine.clone())
    found["sums"] = [each.tolist() for each in (total, largest, later, a, b, inferred)]
    dist.broadcast(sent := mine.clone(), src=1)
    dist.broadcast_object_list(objects := [{"rank": rank}], src=1)
    found["broadcast"] = (sent.tolist(), objects)
    dist.all_gather(parts := [out() for _ in range(world)], mine)
    dist.all_gather_into_tensor(flat := out(2 * world), mine)
    dist.allgather_fn(again := out(2 * world), mine)
    dist.all_gather_coalesced([wide := out(2 * world), thin := out(world)], [mine, mine[:1].clone()])
    with pytest.raises(ValueError, match="give one for each"):
        dist.all_gather_coalesced([wide], [])
    dist.all_gather_object(everything := [None] * world, ("rank", rank))
    found["gathered"] = [torch.cat(parts).tolist(), flat.tolist(), again.tolist(), wide.tolist()]
    found["others"] = (thin.tolist(), everything)
    dist.reduce(one := mine.clone(), dst=1)
    dist.reduce_scatter(part := out(1), [mine[i : i + 1].clone() for i in range(world)])
    dist.reduce_scatter_tensor(same := out(1), mine.clone())
    dist.reduce_scatter_fn(third := out(1), mine.clone())
    found["reduced"] = (one.tolist() if rank == 1 else None, [x.item() for x in (part, same, third)])
    odd = torch.arange(3, dtype=torch.float16) * rank
    found["coalesced"] = [each.tolist() for each in reduce_scatter_coalesced([mine.view(2, 1), odd, odd[:1]])]
    received = [out(1) for _ in range(world)]
    dist.all_to_all(received, [mine[i : i + 1].clone() for i in range(world)])
    dist.all_to_all_single(single := out(2), mine.clone())
    found["exchanged"] = (torch.cat(received).tolist(), single.tolist())
    dist.gather(mine, [out() for _ in range(world)] if rank == 0 else None, dst=0)
    dist.scatter(scattered := out(), [mine, mine + 1] if rank == 0 else None, src=0)
    found["scattered"] = scattered.tolist()
    return found


def test_collectives_are_torchs(ranks: Ranks) -> None:
    first, second = ranks(2, collectives)
    for found in (first, second):
        assert found["sums"] == [[3, 10], [2, 10], [3, 10], [3, 10], [3], [3, 10]]
        assert found["broadcast"] == ([2, 10], [{"rank": 1}])
        assert found["gathered"] == [[1, 0, 2, 10]] * 4
        assert found["others"] == ([1, 2], [("rank", 0), ("rank", 1)])
    assert first["reduced"] == (None, [3] * 3) and second["reduced"] == ([3, 10], [10] * 3)
    assert first["coalesced"] == [[1.5], [0, 0.5], [0]] and second["coalesced"] == [[5], [1], []]
    assert first["exchanged"] == ([1, 2], [1, 2]) and second["exchanged"] == ([0, 10], [0, 10])
    assert first["scattered"] == [1, 0] and second["scattered"] == [2, 1]


def between_two(rank: int, world: int) -> dict[str, Any]:
    """What went from one rank to another, and who is who."""
    mine, theirs, other = torch.full((2,), float(rank)), torch.zeros(2), 1 - rank
    if rank == 0:
        dist.send(mine, 1)
        dist.recv(theirs, 1)
    else:
        dist.recv(theirs, 0)
        dist.send(mine, 0)
    requests = [dist.isend(mine, other), dist.irecv(later := torch.zeros(2), other)]
    requests += dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, batched := torch.zeros(2), other)]
    )
    for request in requests:
        request.wait()
    dist.barrier()
    dist.monitored_barrier()
    backwards = dist.new_group([1, 0])
    mesh = dist.initialize_mesh_device((1, 2), ("data_parallel", "sequence_parallel"))
    groups.mesh_device = mesh
    in_mesh = (groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size())
    groups.mesh_device = None
    found = {
        "received": [each.tolist() for each in (theirs, later, batched)],
        "world": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "ranks": (dist.get_all_ranks_from_group(), dist.get_all_ranks_from_group(backwards)),
        "first": dist.get_global_rank(backwards, 0),
        "mesh": in_mesh,
        "data parallel": (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()),
        "source": groups._get_broadcast_src_rank(),
        "says": (ds_logging.get_dist_msg("x", [0]), ds_logging.get_dist_msg("x", [-1]),
                 ds_logging.get_dist_msg("x")),
    }  # fmt: skip
    torch.distributed.destroy_process_group(groups._get_data_parallel_group())  # which tells nobody
    world_group = groups._get_data_parallel_group()
    found["again"] = dist.get_world_size(world_group)
    dist.destroy_process_group(world_group)
    found["forgotten"] = groups._world is None
    return found


def test_messages_groups_and_ranks(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2, between_two)):
        assert found["received"] == [[1 - rank] * 2] * 3
        assert found["world"] == (rank, 2, "gloo")
        assert found["ranks"] == ([0, 1], [0, 1]) and found["first"] == 0  # torch sorts them
        assert found["mesh"] == (rank, 2) and found["data parallel"] == (rank, 2)
        assert found["source"] == 0 and found["forgotten"] and found["again"] == 2
        said = f"[Rank {rank}] x"
        assert found["says"] == (said if rank == 0 else None, said, None)


def recorded(rank: int, world: int) -> tuple[Any, Any, Any]:
    """The record of a few collectives."""
    dist.reset_log()
    dist.configure(enabled=True, prof_all=False, prof_ops=["chosen"])
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(256), log_name="chosen")
        dist.all_reduce(torch.ones(8), log_name="left out")
        dist.all_reduce(torch.ones(8), prof=True)
        dist.configure(prof_all=True, debug=True)
        dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.ones(4))
        dist.barrier(group=None)
        names, count = dist.get_logged_comm_ops(), dist.get_comm_operation_count()
        summary = dist.log_summary(show_straggler=True, return_dict=True)
    finally:
        dist.configure(enabled=False, debug=False)
        dist.comms_logger.prof_ops = []
        dist.reset_log()
    dist.all_reduce(torch.ones(8))
    return names, (count, dist.has_comm_data()), summary


def test_calls_are_recorded_by_name_and_size(ranks: Ranks) -> None:
    for rank, (names, (count, after), summary) in enumerate(ranks(2, recorded)):
        gathered = "all_gather | [Caller Func: recorded]"
        assert names == ["chosen", "all_reduce", gathered, "barrier | [Caller Func: recorded]"]
        assert count == 6 and not after
        chosen = summary["summary"]["chosen"][1024]
        assert chosen["count"] == 3 and chosen["total_latency_ms"] > 0 and chosen["busbw_avg_gbps"] > 0
        assert summary["summary"][gathered][16]["msg_size_str"] == "16.0 B"
        assert summary["metadata"]["rank"] == rank and summary["metadata"]["world_size"] == 2
        waits = summary["straggler_analysis"]["chosen"][1024]
        assert waits["total_straggler_ms"] >= 0 and waits["total_comm_lat_ms"] > 0
