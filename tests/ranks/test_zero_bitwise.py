"""Stages, bucket sizes, prefetching, releasing and recomputing change no bit of the losses, the gradient
norms or the weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

import models
import threads
import training
from cover import cover, together
from pool import Ranks

STAGES: list[dict[str, Any]] = [{"zero": {"stage": stage}} for stage in (0, 1, 2, 3)]
RECOMPUTE = {"activations": "recompute"}
VARIATIONS: list[dict[str, Any]] = [
    {"zero": {"stage": 1, "bucket_size": "4 KiB"}},
    {"zero": {"stage": 2, "bucket_size": "4 KiB"}, "memory": RECOMPUTE},
    {"zero": {"stage": 0, "min_bucket": "1 MiB"}},
    {"zero": {"stage": 2, "min_bucket": "30 KiB"}},
    {"zero": {"stage": 3, "bucket_size": "4 KiB", "prefetch": 2}},
    {"zero": {"stage": 3, "min_bucket": "30 KiB", "release": "always"}, "memory": RECOMPUTE},
    {"zero": {"stage": 3, "min_bucket": "1 MiB"}},
    {"zero": {"stage": 3, "prefetch": 0}, "memory": RECOMPUTE},
    {"zero": {"stage": 3, "prefetch": 4, "release": "always"}},
    {"zero": {"stage": 3, "prefetch": 2, "release": "always"}, "memory": {**RECOMPUTE, "recompute_every": 2}},
    {"zero": {"stage": 3, "persistence_threshold": 64}, "memory": {"states": "host", "params": "host"}},
    {"zero": {"stage": 3, "persistence_threshold": 1024}},
]
LAYOUTS = STAGES + VARIATIONS
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16", "reduce": "fp32"},
    "bf16 sums": {"compute": "bf16", "reduce": "bf16"},
}
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "clip": 0.5},
    {"name": "lion", "lr": 1e-3, "weight_decay": 0.1, "clip": 0.5},
]


def reducing(sections: dict[str, Any], every: str) -> dict[str, Any]:
    return {**sections, "zero": {**sections["zero"], "reduce_every": every}}


def assert_all_equal(
    ranks: Callable[..., list[Any]], world: int, case: str, settings: list[dict[str, Any]]
) -> training.Run:
    """The run that all of `settings` make."""
    runs = ranks(world, training.train, case, settings)[0]
    found = {i: different for i, run in enumerate(runs) if (different := training.differences(runs[0], run))}
    assert not found, "\n".join(f"{settings[i]} differs from {settings[0]}: {found[i]}" for i in found)
    return runs[0]


class Case(NamedTuple):
    """A run, which is compared with the one of the first layout that is otherwise as it is."""

    model: str
    world: int
    precision: str
    every: str
    layout: int


def cases() -> list[Case]:
    """Every two values of two kinds are in one, in an order that gives four ranks mostly to the smallest
    model; but sums in bf16 depend on how often they are made, so they are made once a step."""
    possible = [
        Case(*each)
        for each in product(
            ("llama", "dag", "gpt2"), (2, 4), PRECISIONS, ("microbatch", "step"), range(1, len(LAYOUTS))
        )
    ]
    possible = [case for case in possible if (case.precision, case.every) != ("bf16 sums", "microbatch")]
    return cover(possible, lambda case: together(case._asdict(), 2))


CASES = cases()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", ["llama", "gpt2", "dag"])
def test_layout_changes_nothing(model: str, world: int) -> None:
    trained = [
        name for name, p in models.build(model).named_parameters(remove_duplicate=False) if p.requires_grad
    ]
    cases = [case for case in CASES if (case.model, case.world) == (model, world)]
    for precision, every in {(case.precision, case.every) for case in cases}:
        chosen = {0, *(case.layout for case in cases if (case.precision, case.every) == (precision, every))}
        sections = {"precision": PRECISIONS[precision], "optimizer": {"clip": 0.5}}
        settings = [
            training.config(world, 2, **reducing(LAYOUTS[at], every), **sections) for at in sorted(chosen)
        ]
        records, weights = assert_all_equal(threads.run, world, model, settings)
        assert records[0][1] > 0.5, "the clip has to cut for this test to test it"
        assert all(torch.isfinite(t).all() for t in weights.values())
        assert all(weights[name].dtype == torch.float32 for name in trained), "the masters"


@pytest.mark.parametrize(("model", "world"), [("llama", 2), ("dag", 4)])
def test_layout_changes_nothing_on_processes(
    ranks: Ranks, request: pytest.FixtureRequest, model: str, world: int
) -> None:
    chosen = LAYOUTS if request.config.getoption("all_cases") else [*STAGES[:2], *VARIATIONS[1::3]]
    settings = [training.config(world, 2, **reducing(layout, "microbatch")) for layout in chosen]
    assert_all_equal(ranks, world, model, settings)


@pytest.mark.parametrize("case", ["llama", "dag"])
@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda options: options["name"])
def test_other_optimizers(case: str, options: dict[str, Any]) -> None:
    assert_all_equal(
        threads.run,
        2,
        case,
        [
            training.config(2, **each, optimizer=options)
            for each in (STAGES[0], STAGES[2], VARIATIONS[0], VARIATIONS[4])
        ],
    )


def test_optimizer_options_differ() -> None:
    """So that equal runs above cannot come from runs that ignore their config."""
    settings = [
        training.config(2, optimizer=o)
        for o in [{"name": "adamw", "lr": 1e-2}, *OPTIMIZERS, {**OPTIMIZERS[0], "clip": "none"}]
    ]
    runs = threads.run(2, training.train, "llama", settings)[0]
    assert all(training.differences(a, b) for i, a in enumerate(runs) for b in runs[:i])
