"""A plan that fits nowhere names what would: more ranks, and the tier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import whole
from polyreme.planner.plan import Plan, plan

WIDTH, LAYERS = 2048, 8
NUMBERS = 4 * LAYERS * (WIDTH**2 + WIDTH)
"""Bytes of the parameters. Gradients are as many, and states twice as many."""


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, WIDTH), torch.zeros(samples, WIDTH)


def planned(times: float, base: str = "h100", **memory: str) -> Plan:
    """On one rank with `times` the bytes of the parameters."""
    config = {"batch": {"size": 8, "micro": 1}, "zero": {"stage": 1, "min_bucket": 0}, "memory": memory}
    cluster = {"base": base, "device": {"memory": int(NUMBERS * times / 0.85), "context": 0}}
    return plan(model, config, 1, cluster, batch=batch, loss_fn=F.mse_loss)


@whole
def test_what_does_not_fit_would_with_states_elsewhere_or_on_more_ranks() -> None:
    made = planned(3.4)
    assert not made.fits and made.tier is not None and made.grown is not None
    assert made.tier.layout.values["memory.states"] == "host" and not made.tier.why
    assert made.grown[0] in (2, 4, 8) and "memory.states" not in made.grown[1].layout.values


def test_what_fits_names_nothing_else() -> None:
    made = planned(9)
    assert made.fits and made.tier is None and made.grown is None


def test_a_tier_that_does_not_help_is_not_named() -> None:
    assert planned(1.2).tier is None


def test_a_cpus_tier_in_host_memory_is_in_its_own() -> None:
    assert planned(3.4, states="host").fits
    made = planned(3.4, "cpu", states="host")
    assert not made.fits and "the device's" in made.found.failed[0].why
