"""DeepSpeed's grid of ranks, divided tensors and norms, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.monitor.config import get_monitor_config
from polyreme.compat.deepspeed.monitor.monitor import MonitorMaster
from polyreme.compat.deepspeed.runtime import utils
from polyreme.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from pool import Ranks


def divided(rank: int, world: int) -> dict[str, Any]:
    """What ranks find of their grid."""
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1))
    layers = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))
    with pytest.raises(AssertionError, match="a grid of 4 ranks"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 2))
    shared, mine = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    shared.grad, mine.grad = torch.tensor([3.0]), torch.tensor([4.0 * (rank + 1)])
    mine.tensor_model_parallel = True  # type: ignore[attr-defined]
    norm = utils.get_grad_norm([shared, mine], mpu=layers)
    clipped = nn.Parameter(torch.zeros(1))
    clipped.grad = torch.tensor([2.0 + 2 * rank])
    mean = utils.clip_grad_norm_([clipped], max_norm=1.5)
    return {
        "stage": (grid.stage_id, grid.is_first_stage, grid.is_last_stage, grid.get_pipe_parallel_rank()),
        "groups": (grid.pp_group, grid.dp_group, grid.slice_group, grid.pipe_groups),
        "sizes": (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size(),
                  grid.get_model_parallel_world_size(), grid.get_slice_parallel_world_size()),
        "next": grid.stage_to_global(1 - rank),
        "layers": (layers.get_tensor_model_parallel_rank(), layers.get_tensor_model_parallel_world_size(),
                   dist.get_world_size(layers.get_slice_parallel_group()), layers.slice_group),
        "norm": norm,
        "clipped": (mean.item(), clipped.grad.item()),
    }  # fmt: skip


def test_ranks_find_their_places(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2, divided)):
        assert found["stage"] == (rank, rank == 0, rank == 1, rank)
        assert found["groups"] == ([0, 1], [rank], [rank], [[0, 1]])
        assert found["sizes"] == (2, 1, 2, 1) and found["next"] == 1 - rank
        assert found["layers"] == (rank, 2, 2, [0, 1])
        assert found["norm"] == pytest.approx((3**2 + 4**2 + 8**2) ** 0.5)
        # the mean of 2 and 4 is the norm of both
        assert found["clipped"] == pytest.approx((3.0, (2 + 2 * rank) / 2))


def monitored(rank: int, world: int, folder: str) -> bool:
    """Whether this rank has a monitor."""
    section = {"enabled": True, "output_path": folder, "job_name": f"rank {rank}"}
    master = MonitorMaster(get_monitor_config({"csv_monitor": section}))
    master.write_events([("loss", 1.0, 1)])
    return master.csv_monitor is not None


def test_the_first_rank_alone_writes_figures(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(2, monitored, str(tmp_path)) == [True, False]
    assert [each.name for each in tmp_path.iterdir()] == ["rank 0"]
