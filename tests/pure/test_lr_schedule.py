"""The learning rate: equal to torch's schedules where they meet, without jumps, and blind to the number of
ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from polyreme.config import Config, Duration, Progress
from polyreme.errors import ConfigError
from polyreme.optim.lr_schedule import LRSchedule

NAMES = ("constant", "linear", "cosine", "wsd", "one-cycle")


def schedule(**keys: Any) -> LRSchedule:
    return LRSchedule(
        Config.load({"lr_schedule": keys, "train": {"length": "100 steps"}}).resolve(1).lr_schedule
    )


def curve(made: LRSchedule, steps: int, samples: int = 8, tokens: int = 64) -> list[float]:
    """The factor at each step, for steps of equal size."""
    return [made.factor(Progress(n, n * samples, n * tokens)) for n in range(steps)]


def torch_curve(build: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = build(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_cosine_equals_torch() -> None:
    expected = torch_curve(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=50, eta_min=0.2), 51)
    assert curve(schedule(name="cosine", total=50, final=0.2), 51) == pytest.approx(expected, abs=1e-12)


def test_linear_equals_torch() -> None:
    expected = torch_curve(
        lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.3, total_iters=40), 60
    )
    assert curve(schedule(name="linear", total=40, final=0.3), 60) == pytest.approx(expected, abs=1e-12)


def test_warmup_then_cosine_equals_torch() -> None:
    def build(optimizer: torch.optim.Optimizer) -> Any:
        rise = lr_scheduler.LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=10)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.05)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[10])

    made = schedule(name="cosine", total=40, warmup=10, start=0.1, final=0.05)
    assert curve(made, 41) == pytest.approx(torch_curve(build, 41), abs=1e-12)


def test_one_cycle_equals_torch() -> None:
    steps = 101  # torch's phases end one step early: at 0.3 * 101 - 1 and at 100

    def build(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=steps, pct_start=31 / steps, div_factor=25, final_div_factor=4
        )

    made = schedule(name="one-cycle", total=100, warmup=30, start=1 / 25, final=1 / 100)
    assert curve(made, steps) == pytest.approx(torch_curve(build, steps), abs=1e-12)


def test_wsd_rises_stays_and_falls() -> None:
    values = curve(schedule(name="wsd", total=100, warmup=10, decay=20, start=0.5, final=0.1), 130)
    assert values[:11] == pytest.approx([0.5 + 0.05 * n for n in range(11)])
    assert values[10:81] == [1.0] * 71
    assert values[80:101] == pytest.approx([1 - 0.9 * n / 20 for n in range(21)])
    assert values[100:] == pytest.approx([0.1] * 30)


def test_defaults_of_the_phases() -> None:
    one_cycle = curve(schedule(name="one-cycle", total=100), 101)
    assert one_cycle.index(max(one_cycle)) == 30
    wsd = curve(schedule(name="wsd", total=100), 101)
    assert wsd[90] == 1.0 > wsd[91]


def test_constant_never_ends() -> None:
    made = schedule(name="constant", warmup=4)
    assert curve(made, 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert made.factor(Progress(10**9, 10**9, 10**9)) == 1.0


def test_a_section_that_was_not_resolved_is_refused() -> None:
    with pytest.raises(ConfigError, match="resolve"):
        LRSchedule(Config().lr_schedule)


PHASES = st.tuples(st.integers(0, 40), st.integers(1, 80), st.floats(0, 1), st.floats(0, 1))


@given(st.sampled_from(NAMES), PHASES)
def test_bounds_peak_end_and_no_jumps(name: str, phases: tuple[int, int, float, float]) -> None:
    warmup, rest, start, final = phases
    assume(warmup or name != "one-cycle")
    keys: dict[str, Any] = {"decay": rest} if name == "wsd" else {}
    made = schedule(name=name, warmup=warmup, total=warmup + rest, start=start, final=final, **keys)
    values = curve(made, warmup + rest + 5)
    assert all(-1e-12 <= value <= 1 + 1e-12 for value in values)
    assert values[0] == pytest.approx(start if warmup else 1.0)
    assert values[warmup] == pytest.approx(1.0)  # the peak is reached when the warm-up ends
    assert values[: warmup + 1] == sorted(values[: warmup + 1])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert values[warmup + rest :] == pytest.approx([1.0 if name == "constant" else final] * 5)
    steepest = math.pi / 2 * max((1 - start) / warmup if warmup else 0, (1 - final) / rest)
    assert all(abs(b - a) <= steepest + 1e-9 for a, b in itertools.pairwise(values))


@given(st.sampled_from(NAMES), st.sampled_from(["samples", "tokens"]), st.integers(1, 8))
def test_the_curve_over_samples_or_tokens_does_not_depend_on_the_step(
    name: str, unit: str, times: int
) -> None:
    keys: dict[str, Any] = {"decay": f"300 {unit}"} if name == "wsd" else {}
    made = schedule(name=name, warmup=f"200 {unit}", total=f"1000 {unit}", **keys)
    small = curve(made, 161, samples=8, tokens=8)
    large = curve(made, 160 // times + 1, samples=8 * times, tokens=8 * times)
    assert large == small[::times][: len(large)]


@given(st.sampled_from(NAMES), st.permutations(["steps", "samples", "tokens"]))
@example("wsd", ["steps", "samples", "tokens"])
def test_lengths_in_different_units_are_the_same_curve_for_equal_steps(name: str, units: list[str]) -> None:
    def spans(warmup: str, total: str, decay: str) -> LRSchedule:
        rate = {"steps": 1, "samples": 8, "tokens": 64}
        keys: dict[str, Any] = {"decay": f"{30 * rate[decay]} {decay}"} if name == "wsd" else {}
        return schedule(
            name=name, warmup=f"{20 * rate[warmup]} {warmup}", total=f"{100 * rate[total]} {total}", **keys
        )

    mixed, plain = curve(spans(*units), 120), curve(spans("steps", "steps", "steps"), 120)
    assert mixed == pytest.approx(plain, abs=1e-12)


def test_lengths_in_different_units_make_no_jump_where_steps_differ() -> None:
    made = schedule(name="cosine", warmup="50 steps", total="40000 tokens")
    values, tokens = [], 0
    for step in range(400):
        values.append(made.factor(Progress(step, step, tokens)))
        tokens += 50 + 100 * (step % 3)
    assert values[50] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)
    assert max(abs(b - a) for a, b in itertools.pairwise(values)) < 0.03


def test_a_decay_in_a_unit_that_nothing_was_counted_in_does_not_begin() -> None:
    made = LRSchedule(
        Config.load({"lr_schedule": {"name": "wsd", "total": 100, "decay": "64 tokens"}})
        .resolve(1)
        .lr_schedule
    )
    assert made.decay == Duration(amount=64, unit="tokens")
    assert made.factor(Progress()) == made.factor(Progress(steps=50)) == 1.0
    assert made.factor(Progress(steps=100)) == pytest.approx(0.1)
