"""Bytes sent by each rank in a step equal the theory to the byte: 2Ψ(n-1)/n for stages 0 to 2, 3Ψ(n-1)/n for
stage 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import polyreme
import probe
import training
from cover import some
from polyreme.layout.bucket_layout import ALIGN
from pool import Ranks

BYTES = {"fp32": 4, "bf16": 2}
TOTALS = 15 * 8
"""The one small all-reduce of a step, in bytes: squared norm, loss, weight, parameters without gradient,
tokens, the loss's divisor, whether to stop, whether a checkpoint failed, whether weights were written to
from outside, whether copies differ, and what tells whether options are alike."""


def measure(rank: int, world: int, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the second step under each of `settings`: calls and bytes by operation, and by unit (the root first)
    the number of buckets and their elements."""
    found = []
    for each in settings:
        model = models.build("llama", torch.float32)
        parameters = sum(p.numel() for p in model.parameters())
        engine = polyreme.initialize(model, each, loss_fn=models.causal_loss)
        batch = models.share(models.batch_of("llama", training.SAMPLES), rank, world)
        engine.train_step(batch)
        before = engine.traffic()["dp"]
        engine.train_step(batch)
        after = engine.traffic()
        assert list(after) == ["dp"]
        units = probe.units(engine)
        layouts = [bucket.layout for unit in units for bucket in unit]
        assert sum(layout.used for layout in layouts) == parameters
        assert all(layout.size - layout.used < ALIGN * (len(layout.slots) + world) for layout in layouts), (
            "padding"
        )
        calls = {
            op: (now[0] - before.get(op, (0, 0))[0], now[1] - before.get(op, (0, 0))[1])
            for op, now in after["dp"].items()
        }
        found.append({
            "sent": {op: counts for op, counts in calls.items() if counts[0]},
            "buckets": [len(unit) for unit in units],
            "sizes": [sum(bucket.layout.size for bucket in unit) for unit in units],
        })  # fmt: skip
    return found


def expected(
    found: dict[str, Any],
    world: int,
    gathers: list[int],
    gather_bytes: int,
    reductions: int,
    reduce_bytes: int,
) -> dict[str, tuple[int, int]]:
    """`gathers` says how often each unit is gathered."""
    gathered = sum(times * size for times, size in zip(gathers, found["sizes"], strict=True)) * gather_bytes
    reduced = sum(found["sizes"]) * reductions * reduce_bytes
    return {
        "all_gather": (
            sum(t * n for t, n in zip(gathers, found["buckets"], strict=True)),
            gathered * (world - 1) // world,
        ),
        "reduce_scatter": (sum(found["buckets"]) * reductions, reduced * (world - 1) // world),
        "all_reduce": (1, TOTALS * (world - 1)),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_whole_parameters(ranks: Ranks, world: int) -> None:
    """2Ψ: one reduction, and one gather: of the weights (stages 1 and 2), or of the reduced gradients, in
    their dtype (stage 0)."""
    cases = some(2 if world == 2 else 1, (0, 1, 2), tuple(BYTES))
    settings = [
        training.config(world, zero={"stage": stage}, precision={"compute": compute})
        for stage, compute in cases
    ]
    for of_rank in ranks(world, measure, settings):
        for (stage, compute), found in zip(cases, of_rank, strict=True):
            wire = BYTES[compute]
            once = [1] * len(found["sizes"])
            assert found["sent"] == expected(found, world, once, wire if stage else 4, 1, wire), (
                stage,
                compute,
            )


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_parameters(ranks: Ranks, world: int) -> None:
    """3Ψ with release="always"; with "auto", less the second gather of the root and of the last block."""
    cases = some(2, tuple(BYTES), ("always", "auto"), (0, 1, 3))
    settings = [
        training.config(
            world, zero={"stage": 3, "release": release, "prefetch": prefetch}, precision={"compute": compute}
        )
        for compute, release, prefetch in cases
    ]
    for of_rank in ranks(world, measure, settings):
        for (compute, release, prefetch), found in zip(cases, of_rank, strict=True):
            twice = [2] * len(found["sizes"])
            gathers = twice if release == "always" else [1, *twice[2:], 1]
            wire = BYTES[compute]
            assert found["sent"] == expected(found, world, gathers, wire, 1, wire), (
                compute,
                release,
                prefetch,
            )


def test_accumulation(ranks: Ranks) -> None:
    """Gradients added up on the rank are sent once, in their own dtype; weights are gathered anew for each
    micro-batch."""
    world, m = 2, 4
    cases = some(2, (0, 1, 2, 3), ("step", "microbatch"), tuple(BYTES))
    settings = [
        training.config(
            world, m, zero={"stage": stage, "reduce_every": every}, precision={"compute": compute}
        )
        for stage, every, compute in cases
    ]
    for of_rank in ranks(world, measure, settings):
        for (stage, every, compute), found in zip(cases, of_rank, strict=True):
            blocks = len(found["sizes"]) - 1
            gathers = [1, *[2 * m] * (blocks - 1), m] if stage == 3 else [1] * (blocks + 1)
            reductions, wire = (m, BYTES[compute]) if every == "microbatch" else (1, 4)
            of_weights = 4 if stage == 0 else BYTES[compute]
            assert found["sent"] == expected(found, world, gathers, of_weights, reductions, wire), (
                stage,
                every,
                compute,
            )


def test_one_rank_sends_nothing(ranks: Ranks) -> None:
    engine_traffic = ranks(1, traffic_of_one)[0]
    assert engine_traffic == {}


def traffic_of_one(rank: int, world: int) -> dict[str, Any]:
    engine = polyreme.initialize(
        models.build("dag", torch.float32),
        training.config(1, zero={"stage": 3}),
        loss_fn=models.CASES["dag"][2],
    )
    engine.train_step(models.batch_of("dag", training.SAMPLES, dtype=torch.float32))
    return engine.traffic()
