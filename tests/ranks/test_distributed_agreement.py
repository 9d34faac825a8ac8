"""Ranks that are given different configs or models: each of them says which keys and names differ, and none
waits for another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import polyreme
from polyreme.errors import PolyremeError
from pool import Ranks

BASE: dict[str, Any] = {"batch": {"size": 4}, "seed": 3}
CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "lr": ({"optimizer": {"lr": 0.5}}, ["optimizer.lr = 0.0003", "0.5 on rank 1"]),
    "clip": ({"optimizer": {"clip": 7.0}}, ["optimizer.clip", "7.0 on rank 1"]),
    "optimizer": ({"optimizer": {"name": "sgd"}}, ["optimizer.name", '"adamw" on rank 0, "sgd" on rank 1']),
    "batch": ({"batch": {"size": 8, "micro": 2}}, ["batch.size = 4", "8 on rank 1"]),
    "seed": ({"seed": 4}, ["seed = 3", "4 on rank 1"]),
    "stage": ({"zero": {"stage": 3}}, ["zero.stage = 2", "3 on rank 1"]),
    "mesh": ({"mesh": {"tp": 2, "dp": 1}}, ["mesh.tp = 1", "mesh.dp = 2"]),
    "wrong": ({"zero": {"stage": 9}}, ["zero.stage"]),
    "nowhere": ({"memory": {"states": "host"}}, ["memory.states", '["host"] on rank 1']),
}


def model(width: int = 4, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width, **changes), nn.Linear(width, 4))


def frozen() -> nn.Module:
    made = model()
    made[0].bias.requires_grad_(False)
    return made


def longer() -> nn.Module:
    return nn.Sequential(*model(), nn.Linear(4, 4))


MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "wider": (
        lambda: model(5),
        ['0.weight: "(4, 4) torch.float32" on rank 0, "(5, 4) torch.float32" on rank 1'],
    ),
    "dtype": (lambda: model(dtype=torch.float64), ["0.weight", "torch.float64"]),
    "frozen": (frozen, ["0.bias", ', frozen" on rank 1']),
    "longer": (longer, ["2.weight: nothing on rank 0"]),
    "function": (lambda: model, ["built here: false on rank 0, true on rank 1"]),
}
OPTIMIZERS: dict[str, tuple[Any, list[str]]] = {
    "class": (torch.optim.SGD, ["optimizer:", "SGD", "AdamW"]),
    "factory": (lambda p: torch.optim.AdamW(p, lr=0.3), ["optimizer:", "0.3"]),
}
LOSSES: dict[str, Any] = {
    "other": (nn.functional.l1_loss, ["loss_fn:", "mse_loss", "l1_loss"]),
    "class": (nn.MSELoss(), ["loss_fn:", "MSELoss"]),
    "none": (None, ["loss_fn:", "null on rank 1"]),
}
SCHEDULERS: dict[str, Any] = {
    "none": (None, ["lr_scheduler:", "null on rank 1"]),
    "class": (torch.optim.lr_scheduler.ConstantLR, ["lr_scheduler:", "ConstantLR"]),
    "number": (
        partial(torch.optim.lr_scheduler.StepLR, step_size=7),
        ["lr_scheduler", "step_size", "5", "7"],
    ),
}


def grouped(of: int) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes two groups of the model's parameters, of which the first has `of`."""
    return lambda p: (
        torch.optim.SGD([{"params": p[:of]}, {"params": p[of:]}], lr=0.1)
        if isinstance(p[0], Tensor)
        else torch.optim.SGD(p)
    )


def logged(power: int, rank: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that knows its rank, as for a log; `power` 2 and 3 are different functions."""
    if power == 2:
        return lambda out, target: ((out - target) ** 2).mean() + 0 * rank
    return lambda out, target: ((out - target) ** 3).mean() + 0 * rank


def said(model: Any, config: dict[str, Any], **others: Any) -> str:
    try:
        polyreme.initialize(model, config, **{"loss_fn": nn.functional.mse_loss, **others})
    except PolyremeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differing(rank: int, world: int) -> dict[str, str]:
    odd = rank == 1
    found = {
        f"config {name}": said(model(), {**BASE, **(change if odd else {})})
        for name, (change, _) in CONFIGS.items()
    }
    found |= {f"model {name}": said(make() if odd else model(), BASE) for name, (make, _) in MODELS.items()}
    found |= {
        f"optimizer {name}": said(model(), BASE, optimizer=each if odd else None)
        for name, (each, _) in OPTIMIZERS.items()
    }
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=5)
    found |= {
        f"loss {name}": said(model(), BASE, loss_fn=each if odd else nn.functional.mse_loss)
        for name, (each, _) in LOSSES.items()
    }
    found |= {
        f"scheduler {name}": said(model(), BASE, lr_scheduler=each if odd else step)
        for name, (each, _) in SCHEDULERS.items()
    }
    found["loss code"] = said(model(), BASE, loss_fn=logged(2 + rank, 0))
    found["optimizer groups"] = said(model(), BASE, optimizer=grouped(1 + rank))
    assert said(model(), BASE, loss_fn=logged(2, rank), lr_scheduler=step, optimizer=grouped(1)) == ""
    local = {
        **BASE,
        "monitor": {"console": odd},
        "checkpoint": {"folder": f"run-{rank}"},
        "data": {"path": f"there/{rank}"},
    }
    found["allowed"] = said(model(), local)
    return found


def test_every_rank_names_what_differs(ranks: Ranks) -> None:
    first, second = ranks(2, differing)
    assert first.pop("allowed") == second.pop("allowed") == ""
    expected = {f"config {name}": names for name, (_, names) in CONFIGS.items()}
    expected |= {f"model {name}": names for name, (_, names) in MODELS.items()}
    expected |= {f"optimizer {name}": names for name, (_, names) in OPTIMIZERS.items()}
    expected |= {f"loss {name}": names for name, (_, names) in LOSSES.items()}
    expected |= {f"scheduler {name}": names for name, (_, names) in SCHEDULERS.items()}
    expected |= {
        "loss code": ["loss_fn:", "logged.<locals>.<lambda> (code "],
        "optimizer groups": ["optimizer's group of 0.bias: 1 on rank 0"],
    }
    for case, names in expected.items():
        kind = "ConfigError" if case.startswith("config") else "ModelError"
        if case == "config wrong":  # only one rank has it
            assert first[case].startswith("LaunchError: rank 1 could not read its config") and second[
                case
            ].startswith(kind)
        else:
            assert first[case] == second[case] and first[case].startswith(kind), case
        for name in names:
            assert name in first[case], case
