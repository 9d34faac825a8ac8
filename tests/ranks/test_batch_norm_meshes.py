"""BatchNorm under tensor parallelism, in a pipeline, compiled and with accumulation, in each way of
`batch_norm`, against plain PyTorch."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import models
import polyreme
import training
from examples import whole
from polyreme.errors import ModelError
from pool import Ranks

WIDTH, STEPS = 6, 2
PLAN = {
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.norm": "replicate",
    "first": "replicate",
    "last": "replicate",
}


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = norm(WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(4))
        self.last = norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    x = torch.randn(training.SAMPLES, WIDTH, dtype=torch.float64)
    return 2 * x + 1, x.sin()


def plain(accumulation: int, dp: int, apart: bool) -> tuple[list[float], dict[str, Tensor]]:
    """apart: each data-parallel rank's share is normalised by itself, and running statistics are those of the
    first."""
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses, each = [], training.SAMPLES // dp // accumulation
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            at = [[rank * each * accumulation + micro * each + i for i in range(each)] for rank in range(dp)]
            for rows in reversed(at) if apart else [[*chain(*at)]]:  # the first share comes last
                before = {name: buffer.clone() for name, buffer in model.named_buffers()}
                loss = F.mse_loss(model(x[rows]), y[rows]) * len(rows) / training.SAMPLES
                loss.backward()
                total += loss.item()
                if apart and rows is not at[0]:
                    for name, buffer in model.named_buffers():
                        buffer.copy_(before[name])
        optimizer.step()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        return [*losses, F.mse_loss(model(batch(9)[0]), batch(9)[1]).item()], model.state_dict()


TP, PP = {"tp": 2, "tp_plan": PLAN}, {"pp": 2}
# ranks, mesh, stage, accumulation, batch_norm, other keys
CASES: list[tuple[int, dict[str, Any], int, int, str, dict[str, Any]]] = [
    (1, {}, 0, 2, "sync", {}),
    (2, {}, 2, 1, "sync", {"compile": True}),
    (2, {}, 3, 2, "broadcast", {}),
    (2, TP, 0, 1, "sync", {}),
    (2, TP, 3, 2, "broadcast", {"memory": {"activations": "recompute"}}),
    (2, PP, 0, 2, "sync", {"memory": {"activations": "recompute"}}),
    (2, PP, 2, 4, "broadcast", {}),
    (4, TP, 0, 1, "sync", {}),
    (4, TP, 2, 2, "broadcast", {}),
    (4, TP, 3, 2, "own", {}),
    (4, PP, 0, 2, "sync", {}),
    (4, PP, 2, 2, "broadcast", {"pipeline": {"schedule": "gpipe"}}),
    (4, PP, 3, 2, "own", {}),
]


def trained(rank: int, world: int, folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for _, mesh, stage, accumulation, way, more in [case for case in CASES if case[0] == world]:
        dp = world // int(mesh.get("tp", mesh.get("pp", 1)))
        made = training.config(
            dp,
            accumulation,
            zero={"stage": stage},
            precision={"compute": "fp64"},
            mesh=mesh,
            **{key: value for key, value in more.items() if isinstance(value, dict)},
        )
        made |= {key: value for key, value in more.items() if not isinstance(value, dict)}
        made |= {"batch_norm": "broadcast" if way == "own" else way}
        made["optimizer"] |= {"weight_decay": 0.0, "clip": None}
        # the blocks are traced all the same
        with mock.patch("torch.compile", partial(torch.compile, backend="eager")):
            engine = polyreme.initialize(
                Net(nn.SyncBatchNorm if way == "own" else nn.BatchNorm1d), made, loss_fn=F.mse_loss
            )
        axis = engine.mesh.dp
        losses = [
            engine.train_step(models.share(batch(step), axis.rank, axis.size)).loss for step in range(STEPS)
        ]
        losses.append(engine.eval_step(models.share(batch(9), axis.rank, axis.size)).loss)
        found.append((losses, engine.state_dict()))
        if mesh == PP:
            saved = load_file(engine.save(folder / f"{stage}-{way}") / "model.safetensors")
            assert saved.keys() == found[-1][1].keys()
            assert all(torch.equal(tensor, saved[name]) for name, tensor in found[-1][1].items())
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=whole), 4])
def test_batch_norm_is_plain_torchs_on_every_mesh(ranks: Ranks, world: int, tmp_path: Path) -> None:
    for found in ranks(world, trained, tmp_path, deprecations="default"):  # torch.compile's own
        for (_, mesh, stage, accumulation, way, _), (losses, state) in zip(
            [c for c in CASES if c[0] == world], found, strict=True
        ):
            case = f"{mesh} stage {stage} {way}"
            expected, weights = plain(
                accumulation, world // int(mesh.get("tp", mesh.get("pp", 1))), way == "broadcast"
            )
            assert losses == pytest.approx(expected, rel=1e-10), case
            assert state.keys() == weights.keys()
            for name, tensor in weights.items():
                torch.testing.assert_close(
                    state[name], tensor, rtol=0, atol=1e-10, msg=lambda m, at=f"{case} {name}": f"{at}: {m}"
                )


def half(rank: int, world: int) -> list[list[float]]:
    found = []
    for mesh in (TP, PP):
        for compute, way in (("bf16", "sync"), ("fp16", "broadcast")):
            scale = {"initial_scale": 1.0} if compute == "fp16" else {}
            made = training.config(
                1, 1, mesh=mesh, zero={"stage": 2}, precision={"compute": compute, **scale}
            ) | {"batch_norm": way}
            made["optimizer"] |= {"weight_decay": 0.0, "clip": None}
            engine = polyreme.initialize(Net(), made, loss_fn=F.mse_loss)
            found.append(
                [engine.train_step(batch(step)).loss for step in range(STEPS)]
                + [engine.eval_step(batch(9)).loss]
            )
            assert {b.dtype for name, b in engine.module.named_buffers() if "running" in name} == {
                torch.float32
            }
    return found


def test_half_precision_on_a_mesh(ranks: Ranks) -> None:
    expected, _ = plain(1, 1, False)
    for found in ranks(2, half):
        for losses in found:
            assert losses == pytest.approx(expected, rel=0.05)


class Between(nn.Module):
    """A BatchNorm on activations that tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def refused(rank: int, world: int, plan: dict[str, str]) -> None:
    mesh = {"tp": 2, "tp_plan": {"blocks.*.0": "colwise", "blocks.*.3": "rowwise", **plan}}
    with pytest.raises(
        ModelError, match=r"blocks\.0\.1, a BatchNorm of 8 channels, is given 4\. .*colwise_gather_output"
    ):
        engine = polyreme.initialize(Between(), training.config(1, mesh=mesh), loss_fn=F.mse_loss)
        engine.train_step(tuple(part.float() for part in batch(0)))


@pytest.mark.parametrize("plan", [{}, {"blocks.*.1": "replicate"}])
def test_a_batch_norm_of_divided_channels_is_refused(ranks: Ranks, plan: dict[str, str]) -> None:
    ranks(2, refused, plan)
