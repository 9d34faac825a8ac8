"""Every home of states, gradients and parameters, with every ZeRO stage, under every schedule: the same bits
of losses, gradient norms and weights. On ranks that are threads: every two of these together, the whole
product with --all-cases."""

from __future__ import annotations

import functools
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
import threads
import training
from cover import cover, together
from examples import ALL
from polyreme.pipeline.schedule import NAMES
from pool import Ranks

FILES = "files"  # in a config here: the test's own folder
WIDTH, MICROBATCHES, STEPS = 6, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Small(nn.Module):
    """Four blocks, as many as schedules make stages of on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def homes(stage: int) -> list[dict[str, Any]]:
    """`memory` sections: all that a stage has."""
    states = [("device", "device"), *product(("host", FILES), repeat=2)]
    params = ("device", "host", FILES) if stage == 3 else ("device",)
    return [
        {"states": where, "gradients": reduced, "params": near}
        for (where, reduced), near in product(states, params)
    ]


def settings(
    stage: int, schedule: str | None, memory: dict[str, Any], folder: Path | None = None
) -> dict[str, Any]:
    """Without a schedule there is no pipeline."""
    size = 2 * MICROBATCHES
    return {
        "batch": {"size": size, "micro": 1},
        "zero": {"stage": stage, "min_bucket": 0, "reduce_every": "microbatch"},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip": 0.1},
        "memory": {key: str(folder) if home == FILES else home for key, home in memory.items()},
        **({"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}} if schedule else {}),
    }


def train(rank: int, world: int, each: list[dict[str, Any]]) -> list[training.Run]:
    runs = []
    for config in each:
        torch.manual_seed(0)
        with polyreme.initialize(Small(), config, loss_fn=F.mse_loss) as engine:
            dp, records = engine.mesh.dp, []
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                x, y = torch.randn(2, 2 * MICROBATCHES, 9, generator=generator)
                result = engine.train_step((x.chunk(dp.size)[dp.rank], y.chunk(dp.size)[dp.rank]))
                records.append((result.loss, result.grad_norm))
            runs.append((records, engine.state_dict(rank0_only=True, master=True)))
    return runs


def world_of(schedule: str | None) -> int:
    return 4 if schedule else 2


@functools.cache
def expected(schedule: str | None) -> training.Run:
    """Without ZeRO, all on the device."""
    found: training.Run = threads.run(world_of(schedule), train, [settings(0, schedule, {})])[0][0]
    assert found[0][0][1] > 0.1, "the clip has to cut"
    return found


Case = tuple[str | None, int, dict[str, Any]]
ALL_CASES: list[Case] = [
    (schedule, stage, memory) for schedule in (None, *NAMES) for stage in range(4) for memory in homes(stage)
]


def pairs(case: Case) -> frozenset[Any]:
    schedule, stage, memory = case
    return together({"schedule": str(schedule), "stage": stage, **memory}, 2)


CASES = ALL_CASES if ALL in os.environ else cover(ALL_CASES, pairs)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", [None, *NAMES])
def test_every_home_makes_the_same_bits(tmp_path: Path, schedule: str | None, stage: int) -> None:
    each = [settings(stage, schedule, case[2], tmp_path) for case in CASES if case[:2] == (schedule, stage)]
    assert each
    runs = threads.run(world_of(schedule), train, each)[0]
    found = {
        i: different
        for i, run in enumerate(runs)
        if (different := training.differences(expected(schedule), run))
    }
    assert not found, "\n".join(f"{each[i]['memory']}: {found[i]}" for i in found)


@pytest.mark.parametrize("schedule", [None, "zb-v"])
def test_processes_make_the_bits_of_threads(ranks: Ranks, schedule: str | None) -> None:
    run = ranks(world_of(schedule), train, [settings(0, schedule, {})])[0][0]
    assert not training.differences(expected(schedule), run)
