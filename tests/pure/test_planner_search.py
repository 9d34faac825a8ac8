"""The search for what a config leaves open finds what trying all layouts finds."""

from __future__ import annotations

import math
import os
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import ALL, always
from polyreme.config import SEARCHED, Config
from polyreme.errors import ConfigError, Problem
from polyreme.pipeline.schedule import NAMES, Name, build, halves, stage_ranks
from polyreme.pipeline.simulate import Costs, simulate
from polyreme.planner.search import Cost, Layout, Limits, layouts, search, smallest

OPEN: dict[str, Any] = {
    "mesh": {"tp": "auto", "pp": "auto"},
    "zero": {"stage": "auto"},
    "memory": {"states": "auto", "activations": "auto"},
    "pipeline": {"virtual": "auto"},
    "batch": {"size": 16},
}
RATE, NUMBERS, FLOPS, BLOCKS = 1e12, 10**9, 1e15, 8


def limits(memory: float, host: int = 0) -> Limits:
    return Limits(int(memory), host, RATE, 8)


@cache
def stepped(name: Name, pp: int, microbatches: int, virtual: int) -> tuple[float, float, float]:
    """A schedule's step beside one without bubbles, the micro-batches that a rank keeps at most, and the part
    of all backwards that are divided."""
    schedule = build(name, pp, microbatches, virtual)
    stages = len(stage_ranks(name, pp, virtual)) // pp
    found = simulate(schedule, Costs.even(schedule, transfer=0.02 * stages))
    whole = microbatches * stages
    return found.total / (3 * whole), max(found.peak) / stages, len(halves(schedule)) / (whole * pp)


def judge(config: Config, blocks: int = BLOCKS) -> Cost:
    """A model of a machine: each axis makes traffic, small micro-batches are slow, and schedules wait, keep
    and divide as much as they do."""
    axes, memory, micro = config.axes, config.memory, int(config.batch.micro)
    pp, virtual = axes["pp"], config.pipeline.virtual
    ratio, kept, divided = stepped(config.schedule, pp, config.accumulation, virtual)
    stages = len(stage_ranks(config.schedule, pp, virtual)) // pp if pp > 1 else 1
    busiest = max(1.0, stages * math.ceil(blocks / (pp * stages)) * pp / blocks)
    share = NUMBERS / (axes["tp"] * pp)
    stage, dp = int(config.zero.stage), axes["dp"]
    size = share * (2 if stage < 3 else 2 / dp) + share * (2 if stage < 2 else 2 / dp)
    host = 12 * share / dp
    if memory.states == "device":
        size, host = size + host, 0
    size += 1e8 * micro * kept * busiest / (pp * axes["tp"]) * (1 if memory.activations == "keep" else 0.1)
    work = FLOPS * (1 if memory.activations == "keep" else 4 / 3) / (math.prod(axes.values()) * RATE)
    seconds = work * ratio * busiest * (1 + 0.3 / micro) * (1 + 0.02 * divided)
    seconds += 0.01 * axes["tp"] + 0.02 * (stage == 3) + 0.1 * (host > 0)
    return Cost(int(size), int(host), f"tp {axes['tp']}", seconds, FLOPS)


@settings(max_examples=25 if ALL in os.environ else 4, deadline=None)
@given(st.integers(0, 3), st.floats(2e8, 3e10), st.booleans(), st.integers(1, 8), st.booleans())
def test_it_finds_the_best_of_all(power: int, memory: float, host: bool, blocks: int, compiled: bool) -> None:
    """Among them all schedules that the engine has, with any number of stages."""
    ranks, config = 1 << power, Config.load({**OPEN, "compile": compiled})
    most, costs = limits(memory, 10**11 if host else 0), partial(judge, blocks=blocks)
    tried = [*layouts(config, ranks, most, blocks)]
    every = [costs(layout.config) for layout in tried]
    fitting = [cost.seconds for cost in every if cost.memory <= most.memory]
    found = search(config, ranks, most, costs, blocks, tries=10**6)
    assert [each.seconds for each in found.best[:1]] == sorted(fitting)[:1]
    assert len(found.best) + len(found.failed) + found.left_out == len(every) and not found.unjudged
    assert all(each.why for each in found.failed)
    others = [costs(each) for layout in tried for each in other_schedules(layout, ranks, blocks)]
    best = min((each.seconds for each in (*every, *others) if each.memory <= most.memory), default=math.inf)
    assert not found.best or found.best[0].seconds <= 1.03 * best
    assert found.best or best == math.inf
    more = search(config, ranks, limits(2 * memory, most.host), costs, blocks, tries=10**6)
    if found.best:  # more memory never makes the best one slower
        assert more.best[0].seconds <= found.best[0].seconds


def other_schedules(layout: Layout, ranks: int, blocks: int) -> list[Config]:
    """The configs that differ from a layout with 1f1b in the schedule, with those that are never tried."""
    pp = layout.config.mesh.pp
    if pp == 1 or layout.config.schedule != "1f1b":
        return []
    found = []
    for name in NAMES:
        for virtual in range(2, blocks // pp + 1) if name == "interleaved" else (2,):
            values = {**layout.values, "pipeline.schedule": name, "pipeline.virtual": virtual}
            given = layout.config.chosen(values)
            if len(stage_ranks(name, pp, virtual)) <= blocks and not given.problems(ranks):
                found.append(given.resolve(ranks))
    return found


SEARCHES: dict[str, Any] = {"memory": {"activations": "auto"}}
WHOLE, HALVED = {"1f1b", "interleaved", "gpipe"}, {"1f1b-w", "zb-h1", "zb-v"}


@pytest.mark.parametrize(
    ("given", "schedules"),
    [
        (SEARCHES, WHOLE | HALVED),
        ({**SEARCHES, "compile": True}, WHOLE),  # a compiled block computes all its gradients at once
        ({**SEARCHES, "pipeline": {"schedule": "gpipe"}}, {"gpipe"}),
        ({**SEARCHES, "pipeline": {"schedule": "zb-h1"}}, {"zb-h1"}),
        ({}, {"1f1b-w"}),  # there is no search, and a run would have the default
        ({"compile": True}, {"1f1b"}),
    ],
)
def test_schedules_that_are_tried(given: dict[str, Any], schedules: set[str]) -> None:
    config = Config.load({"mesh": {"pp": 2}, "batch": {"size": 16, "micro": 2}, **given})
    assert {each.config.schedule for each in layouts(config, 4, limits(1e12), 8)} == schedules


@pytest.mark.parametrize(("blocks", "virtual"), [(3, set()), (4, {2}), (6, {3}), (8, {2, 4}), (20, {2, 5})])
def test_stages_share_out_blocks_evenly(blocks: int, virtual: set[int]) -> None:
    config = Config.load({"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved", "virtual": "auto"}})
    found = [each.config for each in layouts(config, 2, limits(1e12), blocks)]
    assert {each.pipeline.virtual for each in found} == virtual
    assert {each.schedule for each in found} <= {"interleaved"}


def test_what_is_given_stays() -> None:
    config = Config.load({**OPEN, "mesh": {"tp": 2, "pp": "auto"}, "zero": {"stage": 2}})
    for layout in layouts(config, 8, limits(1e12), 4):
        assert layout.config.mesh.tp == 2 and layout.config.zero.stage == 2
        assert layout.config.origins["mesh.pp"] in ("derived", "default")


def test_what_does_not_fit_says_what_is_missing() -> None:
    config = Config.load({**OPEN, "pipeline": {"schedule": "1f1b"}})
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


@pytest.mark.parametrize("memory", always([2e8, 5e8, 1e9, 1e10], 1e9))
def test_few_tries_are_spent_on_what_may_be_the_best(memory: float) -> None:
    """With a fourth of all layouts, what is found is within 3% of what all of them have."""
    config = Config.load({**OPEN, "zero": {"stage": 2}, "memory": {"activations": "auto"}})
    every = [*layouts(config, 8, limits(memory), BLOCKS)]
    costs = [judge(each.config) for each in every]
    best = min((each.seconds for each in costs if each.memory <= memory), default=math.inf)
    found = search(config, 8, limits(memory), judge, BLOCKS, tries=len(every) // 4)
    assert (found.best[0].seconds if found.best else math.inf) <= 1.03 * best
