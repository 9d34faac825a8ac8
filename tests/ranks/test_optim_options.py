"""What a script does to the options of an optimizer's groups comes back by `engine.load`, whoever made the
optimizer and its schedule: a run that was killed and goes on is the one that never was, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import polyreme
import threads
from cover import some

STEPS, SAVED = 6, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank: int, world: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=draw), torch.randn(8, 3, generator=draw)
    return x.double().chunk(world)[rank], y.double().chunk(world)[rank]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95))


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, 1.0, 2), schedulers.MultiStepLR(optimizer, [2, 4], gamma=0.5)],
        [2],
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "config's": lambda model: None,
    "class": lambda model: torch.optim.AdamW,
    "factory": lambda model: adamw,
    "own": lambda model: adamw(model.parameters()),
}
SCHEDULES = ("none", "config's", "factory", "own")


def weight_decay(engine: Any, step: int) -> None:
    if step == 1:
        engine.optimizer.param_groups[0]["weight_decay"] = 0.3


def rates(engine: Any, step: int) -> None:
    if step == SAVED - 1:  # right before it is saved
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.005


def several(engine: Any, step: int) -> None:
    if step == 2:
        group = engine.optimizer.param_groups[0]
        group.update(betas=(0.5, 0.6), eps=1e-3, my_own="kept")


CHANGES = {"weight decay": weight_decay, "rates": rates, "several": several}


def begun(rank: int, world: int, stage: int, way: str, schedule: str, **sections: Any) -> Any:
    model = network()
    optimizer = OPTIMIZERS[way](model)
    config: dict[str, Any] = {
        "batch": {"size": 8},
        "zero": {"stage": stage, "min_bucket": 0},
        "precision": {"compute": "fp64"},
        "optimizer": {"lr": 0.01, **sections},
    }
    scheduler: Any = None
    if schedule == "config's":
        config["lr_schedule"] = {"name": "cosine", "warmup": "2 steps", "total": "20 steps"}
    elif schedule == "factory":
        scheduler = warmup
    elif schedule == "own":
        seen = optimizer if way == "own" else torch.optim.SGD([torch.zeros(1)], lr=0.01)
        scheduler = schedulers.StepLR(seen, 2, 0.5)
    return polyreme.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler, loss_fn=F.mse_loss)


def gone_on(rank: int, world: int, cases: list[Any], folder: Path) -> list[tuple[Any, Any, Any]]:
    """Of each case, what counts at the end: of the run that was never killed, and of the one that was; and
    what `load` said."""
    found = []
    for number, (way, schedule, change, stage) in enumerate(cases):
        ends: list[Any] = []
        notes: Any = None
        for killed in (False, True):
            engine = begun(rank, world, stage, way, schedule)
            if killed:
                notes = engine.load(folder / str(number)).notes
            for step in range(SAVED if killed else 0, STEPS):
                engine.train_step(batch(rank, world, step))
                CHANGES[change](engine, step)
                if step == SAVED - 1:
                    engine.save(folder / str(number))
            options = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
            ends.append((options, {name: t.tolist() for name, t in engine.state_dict().items()}))
            engine.close()
        found.append((ends[0], ends[1], notes))
    return found


CASES = [
    case
    for case in some(2, list(OPTIMIZERS), SCHEDULES, list(CHANGES), (0, 2, 3))
    if case[:2] != ("own", "config's")  # which is refused
]


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_script_set_comes_back(world: int, tmp_path: Path) -> None:
    for found in threads.run(world, gone_on, CASES, tmp_path):
        for case, (never, killed, notes) in zip(CASES, found, strict=True):
            assert never == killed, case
            assert list(notes) == [], case
