"""Short training runs that the tests of the core share: a config in a line, and records and weights of a run
under it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import models
import polyreme

Run = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]
"""(loss, gradient norm) of each step, and the final weights (on rank 0)."""

SAMPLES = 8


def config(world: int, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    """A config for SAMPLES a step; `zero`, `precision`, ... are merged over defaults that suit tiny models:
    no block is joined with another, AdamW at 1e-2."""
    defaults: dict[str, dict[str, Any]] = {
        "batch": {"size": SAMPLES, "micro": SAMPLES // world // accumulation},
        "zero": {"stage": 2, "min_bucket": 0},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    }
    return {key: {**defaults.get(key, {}), **sections.get(key, {})} for key in {**defaults, **sections}}


@contextmanager
def warned(rank: int, match: str) -> Iterator[None]:
    """What all ranks find, the first one warns of, and no other."""
    if rank == 0:
        with pytest.warns(UserWarning, match=match):
            yield
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=f"(?s).*{match}")
            yield


def train(
    rank: int,
    world: int,
    case: str,
    settings: Iterable[Mapping[str, Any]],
    steps: int = 2,
    seed_by_rank: bool = False,
) -> list[Run]:
    """A run of `models.CASES[case]` under each of `settings`, on the same global batches whatever the world
    size."""
    runs = []
    for each in settings:
        model = models.build(case, torch.float32, seed=rank if seed_by_rank else 0)
        engine = polyreme.initialize(model, each, loss_fn=models.CASES[case][2])
        records = []
        for step in range(steps):
            result = engine.train_step(
                models.share(models.batch_of(case, SAMPLES, step, torch.float32), rank, world)
            )
            records.append((result.loss, result.grad_norm))
        runs.append((records, engine.state_dict(rank0_only=True, master=True)))
    return runs


def differences(one: Run, other: Run) -> list[str]:
    """What of two runs is not equal to the last bit."""
    found = [] if one[0] == other[0] else [f"records {one[0]} and {other[0]}"]
    if one[1].keys() != other[1].keys():
        return [*found, f"names {sorted(one[1])} and {sorted(other[1])}"]
    return found + [
        f"{name} by {(t - other[1][name]).abs().max():g}"
        for name, t in one[1].items()
        if not torch.equal(t, other[1][name])
    ]
