"""What FSDP2 saves through torch.distributed.checkpoint is read as whole tensors."""

from __future__ import annotations

import copy
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from polyreme.checkpoint.formats.dcp import DCPCheckpoint
from polyreme.checkpoint.sources import MODEL
from pool import Ranks


def save_sharded(rank: int, world_size: int, path: Path) -> None:
    """Trains a step under FSDP2, saves, and compares what is read with the same step without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizers = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        optimizers.append(optimizer)
    weights, states = get_state_dict(model, optimizers[1])
    table = torch.arange(35.0).view(5, 7)
    extra: dict[str, Any] = {
        "columns": distribute_tensor(table, mesh, [Shard(1)]),
        "same": distribute_tensor(table, mesh, [Replicate()]),
    }
    dcp.save({"model": {**weights, **extra}, "optim": states}, checkpoint_id=path)
    source = DCPCheckpoint(path)
    assert source.ranks == world_size

    def whole(kind: str, name: str) -> torch.Tensor:
        shape = source.tensors[kind][name].shape
        return source.read(kind, name, 0, prod(shape)).view(shape)

    assert torch.equal(whole(MODEL, "columns"), table) and torch.equal(whole(MODEL, "same"), table)
    assert torch.equal(source.read(MODEL, "columns", 3, 19), table.flatten()[3:19])
    for (name, parameter), sharded in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(MODEL, name), parameter.detach())
        assert torch.equal(whole(MODEL, name), sharded.full_tensor())
        for kind, tensor in optimizers[1].state[sharded].items():
            assert torch.equal(whole(kind, name), tensor.full_tensor() if kind != "step" else tensor)
    source.compare(source.contributions(0, 1))


def test_sharded_checkpoints_are_whole(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_sharded, tmp_path / "saved", deprecations="default")
