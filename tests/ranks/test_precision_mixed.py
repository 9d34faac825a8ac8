"""Models of several dtypes, and torch.autocast, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import polyreme
import training
from polyreme.errors import ConfigError
from polyreme.step.precision import AUTOCAST
from pool import Ranks


class Adapted(nn.Module):
    """A frozen base in bf16, with weights in uint8 (to be scaled), and adapters to be trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter = nn.Linear(6, 6).bfloat16().requires_grad_(False), nn.Linear(6, 6)
        self.packed = nn.Parameter(torch.randint(0, 255, (6, 6), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = (self.packed.to(x.dtype) - 127) / 255
        return torch.tanh(self.base(x.bfloat16()).to(x.dtype) + self.adapter(x)) @ packed


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


FIRST = 2.0**17
"""A loss scale at which the first step of `Blocks` overflows in fp16, and the second does not."""


def batch(step: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    x = torch.randn(training.SAMPLES, width, dtype=dtype)
    return x, x.sin()


def plain(
    model: nn.Module, width: int, dtype: torch.dtype, cast: torch.dtype | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses, scaler = [], torch.amp.GradScaler("cpu", init_scale=FIRST, enabled=cast is torch.float16)
    for step in range(3):
        x, y = batch(step, width, dtype)
        with torch.autocast("cpu", cast, enabled=cast is not None):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, model.state_dict()


def config(world: int, stage: int, compute: str, activations: str = "keep") -> dict[str, Any]:
    made = training.config(
        world, zero={"stage": stage}, precision={"compute": compute}, memory={"activations": activations}
    )
    made["optimizer"] |= {"weight_decay": 0.0, "clip": None}
    return made


def adapted(rank: int, world: int, folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for stage in (0, 2, 3):
        engine = polyreme.initialize(Adapted(), config(world, stage, "fp64"), loss_fn=F.mse_loss)
        losses = [
            engine.train_step(models.share(batch(step, 6, torch.float64), rank, world)).loss
            for step in range(3)
        ]
        engine.save(folder / str(stage))
        fresh = polyreme.initialize(
            Adapted(), config(world, 3 - stage, "fp64") if stage != 2 else config(world, 2, "fp64")
        )
        fresh.load(folder / str(stage))
        found.append((losses, fresh.state_dict()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parameters_of_another_dtype_stay_what_they_are(
    ranks: Ranks, world: int, tmp_path: Path
) -> None:
    model = Adapted()
    model.adapter.double()
    losses, weights = plain(model, 6, torch.float64)
    for runs in ranks(world, adapted, tmp_path):
        for got, state in runs:
            assert got == pytest.approx(losses, rel=1e-10)
            for name, tensor in weights.items():
                assert state[name].dtype == tensor.dtype, name
                torch.testing.assert_close(
                    state[name], tensor, rtol=0, atol=1e-10 if name.startswith("adapter") else 0
                )


def autocast(rank: int, world: int, compute: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """In both loops; evaluation has the loss of the next step."""
    found = []
    for stage, activations, loop in (
        (0, "keep", False),
        (2, "recompute", False),
        (3, "keep", False),
        (3, "recompute", True),
    ):
        settings = config(world, stage, compute, activations)
        settings["precision"]["initial_scale"] = FIRST * world  # a rank's gradient is a part of the mean
        engine = polyreme.initialize(Blocks(), settings, loss_fn=F.mse_loss)
        losses = []
        for step in range(3):
            x, y = models.share(batch(step, 16, torch.float32), rank, world)
            evaluated = engine.eval_step((x, y)).loss
            if loop:
                output = engine(x)
                assert output.dtype == torch.float32
                engine.backward(F.mse_loss(output, y))
            result = engine.step() if loop else engine.train_step((x, y))
            assert result.loss == pytest.approx(evaluated, rel=1e-6)
            losses.append(result.loss)
        found.append((losses, engine.state_dict()))
    return found


@pytest.mark.parametrize(("world", "compute"), [(1, "bf16"), (2, "bf16"), (1, "fp16"), (2, "fp16")])
def test_autocast_is_torchs(ranks: Ranks, world: int, compute: str) -> None:
    """With torch's GradScaler for fp16."""
    compute = f"autocast-{compute}"
    losses, weights = plain(Blocks(), 16, torch.float32, AUTOCAST[compute])
    exact, _ = plain(Blocks(), 16, torch.float32)
    assert losses != pytest.approx(exact, rel=1e-5)
    for runs in ranks(world, autocast, compute):
        for got, state in runs:
            assert got == pytest.approx(losses, rel=1e-6 if world == 1 else 1e-3)
            for name, tensor in weights.items():
                assert state[name].dtype == torch.float32
                torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6 if world == 1 else 2e-2)


def test_autocast_is_refused_where_it_does_not_reach() -> None:
    with pytest.raises(ConfigError, match=r"(?s)precision\.compute.*mesh\.tp divides"):
        polyreme.Config.load({"precision": {"compute": "autocast-bf16"}, "mesh": {"tp": 2}}).resolve(2)
