"""The backend and the optimizer that the page about extending shows keep to what others of their kind do."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import conformance
import polyreme
import threads
from polyreme.distributed import mesh
from polyreme.distributed.mesh import Axis
from polyreme.distributed.world import current
from pool import Ranks
from test_docs import ROOT, blocks

INPUTS = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
TARGETS = torch.ones(8, 1, dtype=torch.float64)


def shown(name: str, folder: Path) -> Any:
    """A module of the page, written into the folder."""
    block = next(each for each in blocks(ROOT / "docs" / "extending.md") if each.file == f"{name}.py")
    file = folder / f"{name}.py"
    file.write_text(block.text, "utf-8")
    return load(file)


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Together(Axis):
    """An axis of the pool's ranks."""

    def barrier(self) -> None:
        """Return once no rank is in it any more: a rank that breaks off next would end it for the others."""
        super().barrier()
        dist.barrier()


def over_folder(rank: int, world: int, test: str, file: Path, folder: Path) -> None:
    """On one rank: a test of the conformance suite, with the page's backend."""
    toy, numbers = load(file), itertools.count()

    def axis_over(kind: str, rank: int, world: int, timeout: float = 600.0) -> Axis:
        return Together("dp", world, rank, toy.Folder("dp", world, rank, folder / str(next(numbers))))

    with patch.object(conformance, "axis_over", axis_over):
        getattr(conformance, test)(rank, world, "folder")


@pytest.mark.parametrize("test", ["conforms", "breaks_off"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_backend_keeps_to_the_contract(ranks: Ranks, tmp_path: Path, world: int, test: str) -> None:
    shown("toy_backend", tmp_path)
    ranks(world, over_folder, test, tmp_path / "toy_backend.py", tmp_path / "exchanges")


def train(rank: int, world: int, file: Path | None, folder: Path) -> dict[str, torch.Tensor]:
    """On one rank: weights after two steps, over the page's backend where there is one."""
    made, numbers = mesh._axis, itertools.count()

    def axis(name: str, size: int, rank: int, group: dist.ProcessGroup, *more: Any) -> Axis:
        if file is None:
            return made(name, size, rank, group, *more)
        place = folder / f"{name}-{dist.get_process_group_ranks(group)}-{next(numbers)}"
        own = Axis(name, size, rank, load(file).Folder(name, size, rank, place))
        current().of(mesh.OpenAxes).axes.add(own)
        return own

    torch.manual_seed(0)
    config = {"zero": {"stage": 3}, "batch": {"size": 8}}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with patch.object(mesh, "_axis", axis):
        engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            engine.train_step((INPUTS.float().chunk(world)[rank], TARGETS.float().chunk(world)[rank]))
        weights = engine.state_dict()
        engine.close()
    return weights


def test_a_model_trains_over_the_backend(ranks: Ranks, tmp_path: Path) -> None:
    shown("toy_backend", tmp_path)
    wanted = ranks(2, train, None, tmp_path)[0]
    found = ranks(2, train, tmp_path / "toy_backend.py", tmp_path / "exchanges")
    for weights in found:
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_optimizer_updates_as_in_one_process(tmp_path: Path, stage: int) -> None:
    toy = shown("toy_optimizer", tmp_path)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    plain = build()
    optimizer = toy.SignMomentum(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(INPUTS), TARGETS).backward()
        optimizer.step()

    def run(rank: int, world: int) -> dict[str, torch.Tensor]:
        update = {"lr": 1e-2, "weight_decay": 0.1, "no_decay": "none", "clip": None}
        config = {"zero": {"stage": stage}, "batch": {"size": 8}, "optimizer": update}
        config |= {"precision": {"compute": "fp64"}}
        options = {"optimizer": toy.SignMomentum, "loss_fn": nn.functional.mse_loss}
        engine = polyreme.initialize(build(), config, **options)
        for _ in range(3):
            engine.train_step((INPUTS.chunk(world)[rank], TARGETS.chunk(world)[rank]))
        return engine.state_dict()

    for weights in threads.run(2, run):
        for name, weight in plain.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-12, atol=1e-12)
