"""A parallel run computes what one process computes: float64, to 1e-10, against plain PyTorch."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch

import models
import polyreme
from pool import Ranks

STEPS, SAMPLES = 3, 12
LAYOUTS = list(product((0, 1, 2, 3), (1, 3), (False, True), (None, 0.05), ("adamw", "sgd")))
"""stage, accumulation, recompute, clip, optimizer"""


def config(dp: int, stage: int, accumulation: int, recompute: bool, clip: float | None, name: str, **more: Any) -> dict[str, Any]:
    return {
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES, "micro": SAMPLES // dp // accumulation},
        "zero": {"stage": stage, "min_bucket": 0, **more},
        "memory": {"activations": "recompute" if recompute else "keep"},
        "optimizer": {"name": name, "lr": 1e-2, "weight_decay": 0.1, "clip": clip or "none"} | ({"momentum": 0.9} if name == "sgd" else {}),
    }


def train(rank: int, world: int, case: str, settings: list[dict[str, Any]]) -> list[tuple[list[tuple[float, float]], dict[str, Any]]]:
    """Records and final weights of a run under each of `settings`."""
    results = []
    for each in settings:
        engine = polyreme.initialize(models.build(case), each, loss_fn=models.CASES[case][2])
        records = []
        for step in range(STEPS):
            batch = models.batch_of(case, SAMPLES, seed=step)
            result = engine.train_step(models.share(batch, rank, world))
            records.append((result.loss, result.grad_norm))
        results.append((records, engine.state_dict(rank0_only=True)))
    return results


@functools.cache
def expected(case: str, clip: float | None, name: str) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    if name == "adamw":
        optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    else:
        optimizer = lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)  # noqa: E731
    batches = [models.batch_of(case, SAMPLES, seed=step) for step in range(STEPS)]
    return models.plain_training(models.build(case), models.CASES[case][2], batches, optimizer, clip)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", list(models.CASES))
def test_equals_plain_pytorch(ranks: Ranks, case: str, world: int) -> None:
    results = ranks(world, train, case, [config(world, *layout) for layout in LAYOUTS], timeout=300)
    references = {key: expected(case, *key) for key in {layout[3:] for layout in LAYOUTS}}
    for i, layout in enumerate(LAYOUTS):
        records, weights = references[layout[3:]]
        for rank in range(world):
            torch.testing.assert_close(results[rank][i][0], records, rtol=1e-10, atol=1e-10, msg=lambda m, at=layout: f"{at}: {m}")
        for name, tensor in weights.items():
            torch.testing.assert_close(results[0][i][1][name], tensor, rtol=1e-10, atol=1e-10,
                                       msg=lambda m, n=name, at=layout: f"{n} {at}: {m}")  # fmt: skip
