"""Choose what a config leaves open ("auto"): of all layouts that fit, the fastest or the cheapest.

Invariant: whether a layout fits and how long its step takes is only what a dry run and the time model say
(`Judge`). One is left out unjudged only where it cannot be better: where a layout that takes no more memory
by any key does not fit, or where the arithmetic alone takes longer than whole steps of enough others. Not
more than `tries` are judged; `Found.unjudged` counts the others. Where a layout does not fit, the leanest one
with the same axes is judged next. No communication."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, NamedTuple, cast

from pydantic import ByteSize

from polyreme.config import Config
from polyreme.config.describe import toml
from polyreme.config.schema import Schedule
from polyreme.config.validate import divisors
from polyreme.errors import ConfigError, PolyremeError, Problem
from polyreme.pipeline.schedule import stage_ranks

TRIES = 64
"""The most layouts that are judged."""
BEST = 10
"""Layouts that are kept apart as the best ones."""
IDLE: dict[Schedule, float] = {
    "1f1b-w": 2 / 3, "zb-h1": 1 / 3, "1f1b": 1, "interleaved": 1, "zb-v": 1 / 3, "gpipe": 1
}  # fmt: skip
"""How long a rank of one stage waits at least for each of the others, in micro-batches; one of several stages
as much less (docs/pipeline.md)."""
VIRTUAL = range(2, 9)
"""Stages of a rank to try with the interleaved schedule, of which those that share out blocks most evenly are
tried."""
REPEATED = 4 / 3
"""The operations of a step that computes each forward twice, beside one that does not."""
SMALLER = 0.1
"""The part of a step that twice as many micro-batches, half as large, are taken to add, for the order of
tries."""
GROWTH = 10
"""How often the number of ranks is doubled to find one that fits."""


class Cost(NamedTuple):
    """What a layout takes. memory: bytes of the device at their peak, on the rank that takes most. host:
    likewise, off the device. where: the rank and the largest categories, in words. seconds: of a step. flops:
    of the model in a step, over all ranks."""

    memory: int
    host: int
    where: str
    seconds: float
    flops: float
    details: Any = None


@dataclass(frozen=True)
class Limits:
    """What a rank has. memory: bytes of its device. host: of its share of the host's memory, 0 for none to
    use. rate: the peak of its device, in operations per second. ranks_per_host: ranks of one host."""

    memory: int
    host: int
    rate: float
    ranks_per_host: int


@dataclass(frozen=True)
class Layout:
    """One choice of everything that is open. values: by dotted key. config: resolved with them."""

    values: Mapping[str, object]
    config: Config

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return stage_ranks(self.config.schedule, self.config.mesh.pp, self.config.pipeline.virtual)

    @property
    def work(self) -> float:
        """How much longer than the arithmetic of the model a step takes at least."""
        config, pp = self.config, self.config.mesh.pp
        repeats = config.memory.activations != "keep" and config.memory.recompute_every == 1
        waits = IDLE[config.schedule] * (pp - 1) * pp / (len(self.stages) * config.accumulation)
        return (REPEATED if repeats else 1.0) * (1 + waits)

    @property
    def lean(self) -> tuple[int, ...]:
        """The keys that decide the memory: of two layouts with the same axes and stages, one that is nowhere
        smaller takes no less, if it has the same schedule, or the other has 1f1b."""
        memory, config = self.config.memory, self.config
        return (
            int(config.batch.micro),
            int(memory.activations == "keep"),
            -int(config.zero.stage),
            int(memory.states == "device"),
            int(memory.params == "device"),
            int(config.schedule != "1f1b"),
        )

    @property
    def core(self) -> tuple[object, ...]:
        """All that decides but the schedule."""
        return *self.config.axes.values(), *self.lean[:-1]

    @property
    def frame(self) -> tuple[object, ...]:
        """The axes, and the stages of each rank."""
        return *self.config.axes.values(), self.stages


@dataclass(frozen=True)
class Judged:
    """A layout and its cost. why: the reason why it cannot run; "" if it can."""

    layout: Layout
    cost: Cost | None
    why: str = ""

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it cannot run."""
        return math.inf if self.why or self.cost is None else self.cost.seconds


@dataclass(frozen=True)
class Found:
    """The result of a search. best: those that fit, fastest first. failed: those that do not, the nearest
    first. left_out: layouts that cannot be better. unjudged: those for which there were no tries left."""

    best: Sequence[Judged]
    failed: Sequence[Judged] = field(default=())
    left_out: int = 0
    unjudged: int = 0


Judge = Callable[[Config], Cost]
"""Makes a dry run of a resolved config. Raises PolyremeError for one that the model does not allow."""


def layouts(config: Config, ranks: int, limits: Limits, blocks: int) -> Iterator[Layout]:
    """Yield every layout of `ranks` ranks that `config` allows. blocks: the model's, which stages share."""
    searched = {*config.searched}
    fixed = config.chosen({})
    hosts = math.gcd(ranks, limits.ranks_per_host)

    def open_to(key: str, values: Sequence[object]) -> Sequence[Any]:
        return values if key in searched else (fixed.value(key),)

    places = ("device", "host") if limits.host else ("device",)
    stages = (1, 2, 3) if fixed.value("zero.stage") == "auto" else (fixed.value("zero.stage"),)
    own = fixed.value("pipeline.schedule")
    sizes = {"mesh.tp": divisors(hosts), "mesh.pp": divisors(ranks), "mesh.cp": divisors(ranks)}
    for tp, pp, cp in product(*(open_to(key, each) for key, each in sizes.items())):
        if ranks % (tp * pp * cp):
            continue
        schedules: list[dict[str, object]] = [{}] * (pp == 1) or [
            {"pipeline.schedule": name} | ({"pipeline.virtual": virtual} if name == "interleaved" else {})
            for name in (IDLE if searched and own == "auto" else [own])
            for virtual in (open_to("pipeline.virtual", _even(pp, blocks)) if name == "interleaved" else [1])
            if not searched or len(stage_ranks(name, pp, virtual)) <= blocks
        ]
        keep = open_to("memory.activations", ("keep", "recompute"))
        for schedule, stage, states, params, activations in product(
            schedules, stages, open_to("memory.states", places), open_to("memory.params", places), keep
        ):
            values = {
                "mesh.tp": tp, "mesh.pp": pp, "mesh.cp": cp, "zero.stage": stage, "memory.states": states,
                "memory.params": params, "memory.activations": activations, **schedule,
            }  # fmt: skip
            yield from _with_micro(
                config, ranks, {k: v for k, v in values.items() if k in searched or v != fixed.value(k)}
            )


def _even(pp: int, blocks: int) -> list[int]:
    """Return the numbers of stages of a rank with which the busiest rank has the fewest blocks."""
    most = {v: v * math.ceil(blocks / (pp * v)) for v in VIRTUAL if pp * v <= blocks}
    return [v for v, its in most.items() if its == min(most.values())]


def _with_micro(config: Config, ranks: int, values: Mapping[str, object]) -> Iterator[Layout]:
    """Yield the layouts with these values and each size of micro-batches that is possible."""
    chosen = config.chosen(values)
    if chosen.problems(ranks):
        return
    resolved = chosen.resolve(ranks)
    every = divisors(resolved.share)[::-1]
    for micro in every if chosen.batch.micro == "auto" else [int(resolved.batch.micro)]:
        given = chosen.chosen({"batch.micro": micro})
        if given.problems(ranks):
            continue
        yield Layout({**values, "batch.micro": micro}, given.resolve(ranks))


def search(
    config: Config, ranks: int, limits: Limits, judge: Judge, blocks: int, tries: int = TRIES
) -> Found:
    """Judge the layouts of a config on `ranks` ranks, those with the least arithmetic first, until no other
    can be among the best. Raises ConfigError where the config itself cannot run."""
    possible = isinstance(ranks, int) and ranks > 0
    todo = sorted(layouts(config, ranks, limits, blocks), key=_order) if possible else []
    if not todo:
        reason = f"no layout divides them, the batch and the model's {blocks} blocks"
        raise ConfigError(config.problems(ranks) or [Problem("ranks", ranks, reason, "give others")])
    fits: list[Judged] = []
    failed: list[Judged] = []
    left_out = judged = 0
    leanest, queue, done = _leanest(todo), deque(todo), set[int]()
    alike: dict[tuple[object, ...], list[Layout]] = {}
    for layout in todo:
        alike.setdefault(layout.core, []).append(layout)
    while queue:
        layout = queue.popleft()
        if id(layout) in done:
            continue
        done.add(id(layout))
        too_large = any(_dominates(other.layout, layout) for other in failed if other.cost is not None)
        if too_large or _too_slow(layout, fits, ranks, limits):
            left_out += 1
        elif judged == tries:
            return Found(fits, _nearest(failed), left_out, len(todo) - len(done) + 1)
        else:
            judged += 1
            found = _judged(layout, limits, judge)
            (failed if found.why else fits).append(found)
            fits.sort(key=lambda each: each.seconds)
            if not found.why:  # next, schedules that wait for less, where that may make it the fastest
                least = layout.work * fits[0].seconds / found.seconds
                queue.extendleft(each for each in alike[layout.core] if each.work <= least)
            if found.why and found.cost is not None:  # next, whether any other of these axes fits
                queue.appendleft(leanest[layout.frame])
    return Found(fits, _nearest(failed), left_out)


def _leanest(found: Iterable[Layout]) -> dict[tuple[object, ...], Layout]:
    """Return of all axes and schedules the layout that takes the least memory."""
    leanest: dict[tuple[object, ...], Layout] = {}
    for layout in found:
        if layout.frame not in leanest or layout.lean < leanest[layout.frame].lean:
            leanest[layout.frame] = layout
    return leanest


def _order(layout: Layout) -> tuple[float, ...]:
    """Of several schedules 1f1b first, which fits where any other does; nothing off the device; the least
    arithmetic, and few micro-batches; few ranks that share a layer or a line."""
    mesh, memory = layout.config.mesh, layout.config.memory
    away = (memory.states != "device") + (memory.params != "device")
    return (
        mesh.pp > 1 and layout.config.schedule != "1f1b",
        away,
        round(layout.work * (1 + SMALLER * math.log2(layout.config.accumulation)), 2),
        mesh.tp * mesh.pp * mesh.cp,
        int(layout.config.zero.stage),
        -layout.lean[0],
    )


def _dominates(failed: Layout, other: Layout) -> bool:
    """Return whether a layout that does not fit takes no more memory than the other."""
    alike = failed.frame == other.frame and failed.config.schedule in ("1f1b", other.config.schedule)
    return alike and all(a <= b for a, b in zip(failed.lean, other.lean, strict=True))


def _too_slow(layout: Layout, fits: Sequence[Judged], ranks: int, limits: Limits) -> bool:
    """Return whether its arithmetic alone, at the device's peak, takes longer than the best ones' steps."""
    if len(fits) < BEST:
        return False
    cost = fits[BEST - 1].cost
    assert cost is not None
    return cost.flops * layout.work / (ranks * limits.rate) > cost.seconds


def _judged(layout: Layout, limits: Limits, judge: Judge) -> Judged:
    try:
        cost = judge(layout.config)
    except Exception as error:  # of the engine, or of a model that lacks its numbers
        kind = "" if isinstance(error, PolyremeError) else f"{type(error).__name__}: "
        return Judged(layout, None, kind + " ".join(str(error).split()))
    for what, size, most in (("device", cost.memory, limits.memory), ("host", cost.host, limits.host)):
        if size > most and (what != "host" or cost.host):
            room = f"the {binary(most)} of the {what}'s memory that a plan uses"
            return Judged(layout, cost, f"{binary(size - most)} more than {room}: {cost.where}")
    return Judged(layout, cost)


def shown(judged: Judged) -> str:
    """Return the values of a layout as a config has them."""
    values = judged.layout.values.items()
    return ", ".join(f"{key} = {toml(value)}" for key, value in values) or "the config as it is"


def binary(size: int) -> str:
    """Return a number of bytes with its unit."""
    return ByteSize(size).human_readable(separator=" ")


def _nearest(failed: Sequence[Judged]) -> list[Judged]:
    """Those that lack the fewest bytes first, those that the model does not allow last."""
    return sorted(failed, key=lambda each: math.inf if each.cost is None else each.cost.memory)


def smallest(
    config: Config, ranks: int, limits: Limits, judge: Judge, blocks: int,
    doublings: Sequence[int] = range(1, GROWTH + 1),
) -> tuple[int, Judged] | None:  # fmt: skip
    """Return the smallest number of ranks, `ranks` doubled as often as needed, on which a layout fits, and
    of the axes with which one does the layout that `search` would try first; None where no number of
    `doublings` helps. On more ranks each takes no more: where the most do not help, none does."""

    @cache
    def fitting(number: int) -> Judged | None:
        frames: dict[tuple[object, ...], list[Layout]] = {}
        for layout in sorted(layouts(config, number, limits, blocks), key=_order):
            frames.setdefault(layout.frame, []).append(layout)
        for frame in [*frames.values()][:TRIES]:
            lean = min(frame, key=lambda each: each.lean)
            if not (leanest := _judged(lean, limits, judge)).why:
                tried = (leanest if each is lean else _judged(each, limits, judge) for each in frame)
                return next(each for each in tried if not each.why)
        return None

    possible = [ranks << times for times in doublings if any(layouts(config, ranks << times, limits, blocks))]
    if not possible or fitting(possible[-1]) is None:
        return None
    found = possible[bisect_left(possible, True, key=lambda number: fitting(number) is not None)]
    return found, cast("Judged", fitting(found))
