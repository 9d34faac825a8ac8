"""The cheapest of offers, and the numbers of ranks that are asked for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.config import Config
from polyreme.errors import ConfigError, Problem
from polyreme.planner.price import Offer, cheapest, counts, offers

TOKENS, SAMPLES, PRICE = 4096, 16, 2.5


def made(ranks: int, speed: float, fits: bool = True) -> Any:
    """A plan of so many tokens a second."""
    details = SimpleNamespace(
        timeline=SimpleNamespace(tokens_per_second=speed),
        traces=[SimpleNamespace(tokens=TOKENS)],
        config=SimpleNamespace(batch=SimpleNamespace(size=SAMPLES)),
    )
    failed = [] if fits else [SimpleNamespace(why="5 bytes more")]
    found = SimpleNamespace(failed=failed, unjudged=0 if fits else 3)
    return SimpleNamespace(
        ranks=ranks, fits=fits, details=details, found=found, cluster=SimpleNamespace(price=PRICE)
    )


@pytest.mark.parametrize(("most", "asked"), [(1, [1]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_ranks_are_doubled_up_to_the_most(most: int, asked: list[int]) -> None:
    assert counts(most) == asked


@pytest.mark.parametrize(
    ("length", "tokens"), [("10 steps", 10 * TOKENS), ("32 samples", 2 * TOKENS), ("1e6 tokens", 10**6)]
)
def test_a_job_is_as_long_as_train_length_or_as_it_is_told(length: str, tokens: float) -> None:
    config = Config.load({"batch": {"size": SAMPLES}, "train": {"length": length}})
    [offer] = offers(lambda ranks: made(ranks, 100.0), config, 1)
    assert offer.tokens == tokens and offer.hours == pytest.approx(tokens / 100 / 3600)
    [told] = offers(lambda ranks: made(ranks, 100.0), config, 1, tokens=720_000)
    assert (told.hours, told.device_hours, told.cost) == (2, 2, 2 * PRICE)


def test_numbers_of_ranks_that_cannot_be_say_why() -> None:
    def plan_on(ranks: int) -> Any:
        if ranks == 1:
            return made(ranks, 100.0, fits=False)
        if ranks == 2:
            raise ConfigError([Problem("batch.size", 3, "cannot be divided", "choose another")])
        return made(ranks, 100.0)

    found = [*offers(plan_on, Config.load({"batch": {"size": 16}}), 4, 1e6)]
    assert [each.ranks for each in found] == [1, 2, 4] and found[0].why.startswith(
        "5 bytes more; 3 others were not"
    )
    assert "cannot be divided" in found[1].why
    assert [each.hours < math.inf for each in found] == [False, False, True]
    assert cheapest(found) is found[2] and cheapest(found[:2]) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1, 1e6)), min_size=1, max_size=8), st.floats(0.001, 1e3)
)
def test_none_that_is_in_time_costs_less(jobs: list[tuple[int, float]], deadline: float) -> None:
    found = [Offer(ranks, made(ranks, speed), 1e6) for ranks, speed in jobs]
    best = cheapest(found, deadline)
    in_time = [each for each in found if each.hours <= deadline]
    assert (best is None) == (not in_time)
    if best is not None:
        assert best.hours <= deadline and best.cost == min(each.cost for each in in_time)
