"""A parallel run computes what one process computes: float64, to 1e-10, against plain PyTorch. Of all that a
run may be, every three values are in some run; with `--all-cases` the whole product is run."""

from __future__ import annotations

import functools
import os
import random
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

import models
import polyreme
import threads
from conformance import own_collectives
from cover import cover, together
from examples import ALL
from pool import Ranks

STEPS, SAMPLES = 3, 12


class Case(NamedTuple):
    """A run."""

    model: str
    world: int
    stage: int
    accumulation: int
    recompute: bool
    clip: float | None
    optimizer: str

    def config(self) -> dict[str, Any]:
        momentum = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        return {
            "precision": {"compute": "fp64"},
            "batch": {"size": SAMPLES, "micro": SAMPLES // self.world // self.accumulation},
            "zero": {"stage": self.stage, "min_bucket": 0},
            "memory": {"activations": "recompute" if self.recompute else "keep"},
            "optimizer": {
                "name": self.optimizer,
                "lr": 1e-2,
                "weight_decay": 0.1,
                "clip": self.clip or "none",
                **momentum,
            },
        }


CASES = [
    Case(*each)
    for each in product(
        models.CASES, (1, 2, 4), (0, 1, 2, 3), (1, 3), (False, True), (None, 0.05), ("adamw", "sgd")
    )
]
random.Random(0).shuffle(CASES)
FEW = cover(CASES, lambda case: together(case._asdict(), 3))


def train(
    rank: int, world: int, case: str, settings: list[dict[str, Any]]
) -> list[tuple[list[tuple[float, float]], dict[str, Any]]]:
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


@pytest.mark.filterwarnings("ignore:.*no repeated blocks:UserWarning")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("model", list(models.CASES))
def test_equals_plain_pytorch(ranks: Ranks, request: pytest.FixtureRequest, model: str, world: int) -> None:
    """On four processes what is regular and what is least so; the rest on threads, unless all cases are to be
    run."""
    cases = [
        case
        for case in (CASES if request.config.getoption("all_cases") else FEW)
        if (case.model, case.world) == (model, world)
    ]
    on_processes = ALL in os.environ or (world == 4 and model in ("llama", "dag"))
    run = ranks if on_processes else threads.run
    compare(run(world, train, model, [case.config() for case in cases]), cases)


def over_own_collectives(rank: int, world: int, *args: Any) -> Any:
    with own_collectives():
        return train(rank, world, *args)


@pytest.mark.parametrize("model", ["llama", "convnet"])
def test_equals_plain_pytorch_over_the_process_group(ranks: Ranks, model: str) -> None:
    """The path that GPUs take: every two values of what a run may be."""
    cases = [case for case in CASES if (case.model, case.world) == (model, 2)]
    cases = cover(cases, lambda case: together(case._asdict(), 2))
    compare(ranks(2, over_own_collectives, model, [case.config() for case in cases]), cases)


def compare(results: list[Any], cases: list[Case]) -> None:
    for i, case in enumerate(cases):
        records, weights = expected(case.model, case.clip, case.optimizer)
        for result in results:
            torch.testing.assert_close(
                result[i][0], records, rtol=1e-10, atol=1e-10, msg=lambda m, at=case: f"{at}: {m}"
            )
        for name, tensor in weights.items():
            torch.testing.assert_close(results[0][i][1][name], tensor, rtol=1e-10, atol=1e-10,
                                       msg=lambda m, n=name, at=case: f"{n} {at}: {m}")  # fmt: skip
