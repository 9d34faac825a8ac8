"""Models whose modules are not all run by every rank: which ones depends on the rank's data. The numbers are
plain PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads
import training
from polyreme.errors import ConfigError
from pool import Ranks

WIDTH, STEPS = 32, 3  # a block's part is larger than what ranks of one host send each other


class Mixture(nn.Module):
    """Blocks around experts, of which a sample's first number chooses; an expert that no sample chooses is
    not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind: Any = {"dtype": torch.float64}
        self.before = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, **kind), nn.Tanh()) for _ in range(2)
        )
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, **kind), nn.Linear(2 * WIDTH, WIDTH, **kind))
            for _ in range(4)
        )
        self.after = nn.Linear(WIDTH, WIDTH, **kind)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0].long()
        for block in self.before:
            x = block(x)
        out = torch.zeros_like(x)
        for i in chosen.unique(sorted=False).tolist():
            out = out.index_add(0, at := (chosen == i).nonzero()[:, 0], self.experts[i](x[at]))
        return self.after(x + out)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The halves of the batch choose other experts; the last expert gets nothing in the first step."""
    torch.manual_seed(step)
    x, y = torch.randn(2, training.SAMPLES, WIDTH, dtype=torch.float64)
    x[:, 0] = torch.tensor([0.0, 1, 0, 1, 2, 2, 2, 2] if step < 1 else [3.0, 3, 1, 1, 0, 2, 3, 0]) + 0.5
    return x, y


def plain(unused: str) -> training.Run:
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    records = []
    for step in range(STEPS):
        x, y = batch_of(step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters() if unused == "zero" else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        records.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    return records, model.state_dict()


def mixtures(rank: int, world: int, unused: str) -> list[training.Run]:
    runs = []
    for stage in (0, 2, 3):
        for accumulation in (1, 2):
            zero = {"stage": stage, "keep": ["experts.*"]}
            optimizer = {"weight_decay": 0.1, "betas": (0.9, 0.95), "clip": 1.0}
            optimizer |= {"no_decay": "none", "unused": unused}
            config = training.config(
                world, accumulation, zero=zero, precision={"compute": "fp64"}, optimizer=optimizer
            )
            engine = polyreme.initialize(Mixture(), config, loss_fn=nn.functional.mse_loss)
            records = []
            for step in range(STEPS):
                x, y = (each.chunk(world)[rank] for each in batch_of(step))
                result = engine.train_step((x, y))
                records.append((result.loss, result.grad_norm))
            runs.append((records, engine.state_dict(rank0_only=True)))
    return runs


@pytest.mark.parametrize(("world", "unused"), [(1, "skip"), (2, "skip"), (1, "zero"), (2, "zero")])
def test_modules_that_not_every_rank_runs(ranks: Ranks, world: int, unused: str) -> None:
    expected = plain(unused)
    for rank, runs in enumerate(ranks(world, mixtures, unused)):
        for i, (records, weights) in enumerate(runs):
            torch.testing.assert_close(
                records, expected[0], rtol=1e-10, atol=1e-12, msg=lambda m, at=(rank, i): f"{at}: {m}"
            )
            for name, tensor in weights.items():
                torch.testing.assert_close(
                    tensor, expected[1][name], rtol=0, atol=1e-10, msg=lambda m, at=(i, name): f"{at}: {m}"
                )


class Adapted(nn.Module):
    """A frozen layer with a scale that is trained, where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.used = nn.Linear(WIDTH, WIDTH).requires_grad_(False), True
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x).tanh()
        return x * self.scale if self.used else x


def small_ones_left_out(rank: int, world: int) -> list[training.Run]:
    """Runs in which a rank leaves out parameters, all of which stay whole while frozen ones are gathered."""
    runs = []
    for threshold in (0, WIDTH):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Adapted() for _ in range(4))))
        model[0].requires_grad_(False)
        model[1][1].used = model[1][3].used = not rank
        zero = {"stage": 3, "bucket_size": 4 * WIDTH, "persistence_threshold": threshold}
        engine = polyreme.initialize(model, training.config(world, zero=zero), loss_fn=nn.functional.mse_loss)
        result = engine.train_step(tuple(t.float().chunk(world)[rank] for t in batch_of(0)))
        runs.append(([(result.loss, result.grad_norm)], engine.state_dict(master=True)))
    return runs


def test_parameters_that_not_every_rank_uses_beside_frozen_ones() -> None:
    for one, other in threads.run(2, small_ones_left_out):
        assert not training.differences(one, other)


def test_a_name_to_keep_that_nothing_has() -> None:
    with pytest.raises(ConfigError, match=r"zero.keep = 'expert\.\*': no module (.|\n)* such as before\.0, "):
        polyreme.initialize(Mixture(), {"zero": {"keep": ["expert.*"]}, "batch": {"size": 2}})
