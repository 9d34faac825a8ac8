"""Learning rates: of groups by patterns, by ReduceLROnPlateau, and in steps that are skipped, against plain
PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import models
import polyreme
import threads
import training
from polyreme.errors import ConfigError

GROUPS = {
    "embed.*": {"lr": 3e-2},
    "*.bias": {"weight_decay": 0.2},
    "head.*": {"lr": 1e-3, "weight_decay": 0.0},
}
METRICS = [1.0, 0.5, 0.7, 0.6, 0.9, 0.4]


def build() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Linear(6, 5), "body": nn.Linear(5, 5), "head": nn.Linear(5, 1)})
    model.forward = lambda x: model["head"](torch.tanh(model["body"](torch.tanh(model["embed"](x)))))  # type: ignore[method-assign]
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    x = torch.randn(training.SAMPLES, 6, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def plain(groups: bool, make: Any, steps: int = 6) -> tuple[list[float], list[float]]:
    """Losses, and the learning rate of the first group after each step."""
    model = build().double()
    by = {"lr": 1e-2, "weight_decay": 0.1}
    special: dict[str, dict[str, float]] = (
        {
            "embed.weight": {"lr": 3e-2},
            "embed.bias": {"lr": 3e-2},
            "body.bias": {"weight_decay": 0.2},
            "head.bias": {"weight_decay": 0.2},
            "head.weight": {"lr": 1e-3, "weight_decay": 0.0},
        }
        if groups
        else {}
    )
    made = [{"params": [p], **by, **({"weight_decay": 0.0} if p.dim() == 1 else {}), **special.get(name, {})}
            for name, p in model.named_parameters()]  # fmt: skip
    made.sort(key=lambda group: group["lr"] != 1e-2)
    optimizer = torch.optim.AdamW(made, betas=(0.9, 0.95))
    schedule, losses, rates = make(optimizer), [], []
    for step in range(steps):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(*([METRICS[step]] if isinstance(schedule, schedulers.ReduceLROnPlateau) else []))
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def linear(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: 1 - 0.9 * min(1, step / 10))


def trained(rank: int, world: int, way: str, folder: Path) -> list[tuple[list[float], list[float]]]:
    """At each stage; after half of the steps another engine goes on from a checkpoint."""
    found = []
    for stage in (0, 2, 3):
        made = training.config(
            world,
            zero={"stage": stage},
            precision={"compute": "fp64"},
            lr_schedule={"name": "linear", "total": "10 steps"},
        )
        made["optimizer"] |= {"clip": None, **({"groups": GROUPS} if way == "groups" else {})}
        scheduler = {
            "plateau": plateau,
            "own plateau": plateau(torch.optim.SGD([torch.zeros(1)], lr=1e-2)),
        }.get(way)
        losses, rates = [], []
        for half in range(2):
            engine = polyreme.initialize(build(), made, loss_fn=F.mse_loss, lr_scheduler=scheduler)
            if half:
                engine.load(folder / str(stage))
            for step in range(3 * half, 3 * half + 3):
                losses.append(engine.train_step(models.share(batch(step), rank, world)).loss)
                if "plateau" in way:
                    metric = METRICS[step] * (2 * (rank + 1) / 3 if world == 2 else 1)
                    assert engine.plateau(torch.tensor(metric)) == engine.state.lr
                rates.append(engine.state.lr)
            engine.save(folder / str(stage))
        found.append((losses, rates))
    return found


@pytest.mark.parametrize("way", ["groups", "plateau", "own plateau"])
@pytest.mark.parametrize("world", [1, 2])
def test_rates_are_plain_pytorchs(world: int, way: str, tmp_path: Path) -> None:
    losses, rates = plain(way == "groups", linear if way == "groups" else plateau)
    assert len(set(rates)) > 3
    for found in threads.run(world, trained, way, tmp_path):
        for stage, (got, lr) in zip((0, 2, 3), found, strict=True):
            assert got == pytest.approx(losses, rel=1e-10), stage
            assert lr == pytest.approx(rates, rel=1e-12), stage


def skipping(rank: int, world: int, folder: Path) -> list[list[tuple[bool, float]]]:
    """Whether each step was skipped, and the learning rate after it."""
    found = []
    for scheduler, stage in ((None, 0), (linear, 2), (None, 3), (linear, 3)):
        section = {"compute": "fp16", "initial_scale": 2.0**40, "backoff": 2.0**-30}
        made = training.config(
            world,
            zero={"stage": stage},
            precision=section,
            lr_schedule={"name": "linear", "total": "10 steps"},
        )
        records = []
        for half in range(2):
            engine = polyreme.initialize(build(), made, loss_fn=F.mse_loss, lr_scheduler=scheduler)
            if half:
                engine.load(folder / "saved")
            for step in range(2):
                result = engine.train_step(models.share(batch(step), rank, world))
                records.append((result.skipped, engine.state.lr))
            assert engine.state.step == 2 * half + 2
            engine.save(folder / "saved")
        found.append(records)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_skipped_step_leaves_the_schedule_where_it_is(world: int, tmp_path: Path) -> None:
    rates = [1e-2 * (1 - 0.9 * step / 10) for step in (0, 1, 2, 3)]
    for found in threads.run(world, skipping, tmp_path):
        for records in found:
            assert [skipped for skipped, _ in records] == [True, False, False, False]
            assert [lr for _, lr in records] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("groups", "options", "says"),
    [
        (
            {"embed.*": {"lr": 1.0}, "embbed.bias": {"lr": 1.0}},
            {},
            r"optimizer\.groups\.embbed\.bias.*no parameter.*such as embed\.bias",
        ),
        (
            {"embed.*": {"lr": 1.0}},
            {"optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1)},
            "the factory .* decides the groups",
        ),
        (
            {"embed.*": {"lr": -1.0}},
            {},
            r"each a table of \"lr\" or \"weight_decay\", each "
            r"a number of at least 0.*\{\"\*\.embed\*\" = \{lr",
        ),
        ({"embed.*": {"betas": 1.0}}, {}, "lr"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        polyreme.initialize(build(), {"optimizer": {"groups": groups}}, **options)


def test_only_a_plateau_waits_for_a_metric() -> None:
    with pytest.raises(ConfigError, match="waits for no metric"):
        polyreme.initialize(build(), training.config(1)).plateau(0.5)
