"""The search for what a config leaves open finds what trying all layouts finds."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import ALL
from polyreme.config import SEARCHED, Config
from polyreme.errors import ConfigError, Problem
from polyreme.planner.search import Cost, Limits, layouts, search, smallest

OPEN: dict[str, Any] = {
    "mesh": {"tp": "auto", "pp": "auto"},
    "zero": {"stage": "auto"},
    "memory": {"states": "auto", "activations": "auto"},
    "batch": {"size": 64},
}
RATE, NUMBERS, FLOPS = 1e12, 10**9, 1e15


def limits(memory: float, host: int = 0) -> Limits:
    return Limits(int(memory), host, RATE, 8)


def judge(config: Config) -> Cost:
    """A model of a machine: each axis makes traffic, and small micro-batches are slow."""
    axes, memory, micro = config.axes, config.memory, int(config.batch.micro)
    share = NUMBERS / (axes["tp"] * axes["pp"])
    stage, dp = int(config.zero.stage), axes["dp"]
    size = share * (2 if stage < 3 else 2 / dp) + share * (2 if stage < 2 else 2 / dp)
    host = 12 * share / dp
    if memory.states == "device":
        size, host = size + host, 0
    kept = 1e8 * micro / axes["tp"] * (1 if memory.activations == "keep" else 0.1)
    work = FLOPS * (1 if memory.activations == "keep" else 4 / 3) / (math.prod(axes.values()) * RATE)
    seconds = work * (1 + 0.3 / micro) + 0.01 * axes["tp"] + 0.02 * (stage == 3) + 0.1 * (host > 0)
    seconds += work * (axes["pp"] - 1) / config.accumulation
    return Cost(int(size + kept), int(host), f"tp {axes['tp']}", seconds, FLOPS)


@settings(max_examples=25 if ALL in os.environ else 8, deadline=None)
@given(st.integers(0, 5), st.floats(2e8, 3e10), st.booleans(), st.integers(1, 8))
def test_it_finds_the_best_of_all(power: int, memory: float, host: bool, blocks: int) -> None:
    ranks, config = 1 << power, Config.load(OPEN)
    most = limits(memory, 10**11 if host else 0)
    every = [judge(layout.config) for layout in layouts(config, ranks, most, blocks)]
    fitting = [cost.seconds for cost in every if cost.memory <= most.memory]
    found = search(config, ranks, most, judge, blocks, tries=10**6)
    assert [each.seconds for each in found.best[:1]] == sorted(fitting)[:1]
    assert len(found.best) + len(found.failed) + found.left_out == len(every) and not found.unjudged
    assert all(each.why for each in found.failed)
    more = search(config, ranks, limits(2 * memory, most.host), judge, blocks, tries=10**6)
    if found.best:  # more memory never makes the best one slower
        assert more.best[0].seconds <= found.best[0].seconds


def test_what_is_given_stays() -> None:
    config = Config.load({**OPEN, "mesh": {"tp": 2, "pp": "auto"}, "zero": {"stage": 2}})
    for layout in layouts(config, 8, limits(1e12), 4):
        assert layout.config.mesh.tp == 2 and layout.config.zero.stage == 2
        assert layout.config.origins["mesh.pp"] in ("derived", "default")


def test_what_does_not_fit_says_what_is_missing() -> None:
    config = Config.load(OPEN)
    found = search(config, 8, limits(1e8), judge, 4)
    assert (
        not found.best
        and "more than the 95.4 MiB of the device's memory that a plan uses: tp " in found.failed[0].why
    )
    grown = smallest(config, 8, limits(1e8), judge, 4)
    assert grown is not None and grown[0] > 8 and not grown[1].why
    assert smallest(config, 1, limits(1), judge, 4) is None


def test_a_layout_that_the_model_does_not_allow_is_told_apart() -> None:
    def refuses(config: Config) -> Cost:
        if config.mesh.tp > 1:
            raise ConfigError([Problem("mesh.tp", config.mesh.tp, "heads cannot be divided", "give 1")])
        return judge(config)

    found = search(Config.load(OPEN), 4, limits(1e12), refuses, 4)
    assert found.best and all("heads cannot be divided" in each.why for each in found.failed)


def test_auto_is_no_value_before_a_search() -> None:
    for key in SEARCHED:
        section, _, name = key.partition(".")
        config = Config.load({section: {name: "auto"}, "batch": {"size": 8}})
        assert config.searched == (key,)
        with pytest.raises(ConfigError, match=f"{key} = 'auto': only a search .*\n.*polyreme plan"):
            config.resolve(1)
        assert Config.load(config).searched == (key,)
        assert not config.chosen({}).searched
        assert (
            Config.load(config, [f"{key}={default}"]).searched == ()
            if (default := {"mesh.tp": 1, "mesh.pp": 1}.get(key))
            else True
        )
    chosen = Config.load({"mesh": {"tp": "auto"}, "batch": {"size": 8}}).chosen({"mesh.tp": 2}).resolve(4)
    assert chosen.axes["tp"] == 2 and chosen.origins["mesh.tp"] == "derived"
    assert chosen.resolve(8).axes == {**chosen.axes, "dp": 4}
