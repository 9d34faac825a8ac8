"""One rank of a run of any size trains in this process: other ranks are taken to give what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.config import Config
from polyreme.distributed.mesh import SimulatedMesh
from polyreme.engine import Engine
from polyreme.errors import WARNS


@pytest.fixture(autouse=True)
def warns() -> Iterator[None]:
    """Other ranks than the first leave warnings to it."""
    before = WARNS.get()
    yield
    WARNS.set(before)


SIZES = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1}


def engine_of(rank: int, sizes: dict[str, int], stage: int) -> Engine:
    sizes = SIZES | sizes
    world = sizes["dp"] * sizes["tp"]
    given: dict[str, Any] = {
        "mesh": {**sizes, "tp_plan": {"0": "colwise", "2": "rowwise"}} if sizes["tp"] > 1 else sizes,
        "batch": {"size": 2 * sizes["dp"], "micro": 2},
        "zero": {"stage": stage},
        "optimizer": {"clip": "none"},
    }
    config = Config.load(given).resolve(world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    mesh = SimulatedMesh.of(config.axes, config.mesh.order, rank, torch.device("cpu"))
    return Engine(model, config, mesh, loss_fn=nn.functional.mse_loss)


def steps(rank: int, sizes: dict[str, int], stage: int) -> tuple[list[tuple[float, float]], Engine]:
    engine = engine_of(rank, sizes, stage)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, 8, generator=generator), torch.randn(2, 4, generator=generator)
    results = [engine.train_step(batch) for _ in range(2)]
    return [(result.loss, result.grad_norm) for result in results], engine


@pytest.mark.filterwarnings("ignore:all 4 data-parallel ranks")
def test_simulated_ranks_have_the_numbers_of_real_ones() -> None:
    """What one rank tells for all, a simulated one tells in its place: gradients are weighted on each. The
    norm of each counts its own shard four times."""
    ((loss, norm), _), _ = steps(0, {}, 0)
    found = [steps(rank, {"dp": 4}, 0)[0][0] for rank in range(4)]
    assert [loss for loss, _ in found] == [pytest.approx(loss, rel=1e-6)] * 4
    assert sum(each**2 / 4 for _, each in found) == pytest.approx(norm**2, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_tensor_parallelism_counts_its_loss(rank: int) -> None:
    found, _ = steps(rank, {"tp": 2}, 0)
    assert all(0 < number < 100 for each in found for number in each)


@pytest.mark.filterwarnings("ignore:all 1024 data-parallel ranks")
@pytest.mark.parametrize("rank", [0, 511, 1023])
@pytest.mark.parametrize("stage", [0, 3])
def test_of_a_thousand_ranks_any_one_steps(rank: int, stage: int) -> None:
    found, engine = steps(rank, {"dp": 1024}, stage)
    assert all(0 <= number < 100 for each in found for number in each)
    padded = engine.mesh.traffic()["dp"]["reduce_scatter"][1] // 1023 // 2 * 1024
    assert padded % (4 * 64 * 1024) == 0  # every shard is of whole vectors, in each of the two steps
