"""What batches and losses of real scripts become: exact targets, ragged and incomplete batches, short windows, weights of losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
import training
from pool import Ranks


def line(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


class Regression(nn.Module):
    """Returns its loss, as a Hugging Face head does; notes what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = line(torch.float32)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.seen = {"x": x.dtype, "labels": labels}
        output = self.layers(x)
        return {"output": output} if labels is None else {"loss": F.mse_loss(output, labels), "output": output}


def exact_targets(rank: int, world: int) -> None:
    x = torch.randn(training.SAMPLES, 4)[rank::world]
    y, importance = torch.full((len(x), 1), 20001.0), torch.full((len(x), 1), 1.003)
    settings = training.config(world, precision={"compute": "bf16"}, optimizer={"clip": None})
    seen: list[tuple[float, float]] = []

    def weighted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen.append((batch["labels"].max().item(), batch["importance"].max().item()))
        return (F.huber_loss(output, batch["labels"], reduction="none") * batch["importance"]).mean()

    # what only a loss_fn sees, in a mapping and in a tuple; in training and in evaluation
    engine = polyreme.initialize(Regression(), settings, loss_fn=lambda output, batch: weighted(output["output"], batch))
    results = [act({"x": x, "labels": y, "importance": importance}).loss for act in (engine.eval_step, engine.train_step)]
    assert seen == [(20001.0, importance.max().item())] * 2 and engine.module.seen["x"] == torch.bfloat16
    results += [act((x, y)).loss for e in [polyreme.initialize(line(torch.float32), settings, loss_fn=F.huber_loss)]
                for act in (e.eval_step, e.train_step)]  # fmt: skip
    assert all(loss == pytest.approx(20001.0, rel=0.004) for loss in results)
    # a model's own labels; and the same number in the loop
    own = polyreme.initialize(Regression(), settings)
    result = own.train_step({"x": x, "labels": y})
    assert own.module.seen["labels"].dtype == torch.float32 and own.module.seen["x"] == torch.bfloat16
    loop = polyreme.initialize(line(torch.float32), settings)
    loop.backward(F.mse_loss(loop(x), y))
    stepped = loop.step()
    assert (stepped.loss, stepped.grad_norm) == (result.loss, result.grad_norm)
    handed = polyreme.initialize(line(torch.float32), settings, loss_fn=F.mse_loss)
    assert handed.train_step((x, y)).loss == result.loss
    # an output of an autoencoder is compared with the numbers that came, not with those that the model got
    coder = polyreme.initialize(nn.Linear(4, 4), settings, loss_fn=lambda output, target: (target - x).abs().sum() + 0 * output.sum())
    assert coder.train_step(x).loss == 0


def test_targets_are_not_rounded(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, exact_targets)
