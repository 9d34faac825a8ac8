"""DeepSpeed's schedules: its numbers at every step, its arguments and their errors."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import pytest
import torch

from polyreme.compat.deepspeed.runtime import lr_schedules
from polyreme.compat.deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

AT = (0, 1, 2, 5, 8, 9, 14, 18, 20, 31, 32)
"""Numbers of steps of the table below."""

# fmt: off
TABLE: list[tuple[str, dict[str, Any], list[float], list[float]]] = [
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 7,
     "lr_range_test_step_rate": 0.3},
     [0.001, 0.001042857142857143, 0.0010857142857142856, 0.0012142857142857142,
      0.0013428571428571428, 0.0013857142857142857, 0.0016, 0.0017714285714285714,
      0.0018571428571428573, 0.0023285714285714285, 0.002371428571428571],
     []),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 5,
     "lr_range_test_step_rate": 1.7, "lr_range_test_staircase": True},
     [0.001, 0.001, 0.001, 0.0027, 0.0027, 0.0027, 0.0044, 0.0060999999999999995, 0.0078, 0.0112, 0.0112],
     []),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 7,
     "cycle_second_step_size": 11, "decay_step_size": 3, "decay_lr_rate": 0.4, "decay_mom_rate": 0.01},
     [0.01, 0.02285714285714286, 0.035714285714285726, 0.07428571428571426, 0.09181818181818183,
      0.08363636363636363, 0.042727272727272746, 0.01, 0.007894736842105263, 0.003658536585365854,
      0.0034883720930232553],
     [0.8, 0.8857142857142858, 0.8714285714285714, 0.8285714285714286, 0.8090909090909091,
      0.8181818181818182, 0.8636363636363636, 0.9, 0.9059999999999999, 0.939, 0.942]),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 9,
     "cycle_second_step_size": 5, "cycle_first_stair_count": 3, "cycle_second_stair_count": 4},
     [0.01, 0.01, 0.01, 0.04, 0.07, 0.1, 0.01, 0.01, 0.01, 0.01, 0.01],
     [0.8, 0.9, 0.9, 0.8666666666666667, 0.8333333333333334, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9]),
    ("WarmupLR", {"warmup_num_steps": 9},
     [0.0, 0.0, 0.09463946303571859, 0.21974602810768903, 0.2839183891071558, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
     []),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 9, "warmup_type":
     "linear"},
     [0.01, 0.01, 0.03111111111111111, 0.09444444444444444, 0.1577777777777778, 0.1788888888888889,
      0.2, 0.2, 0.2, 0.2, 0.2],
     []),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 9},
     [0.0, 0.0, 0.00031546487678572866, 0.0007324867603589635, 0.000946394630357186, 0.001,
      0.0008095238095238096, 0.0006190476190476191, 0.0005238095238095238, 0.0, 0.0],
     []),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_min_lr": 0.001, "warmup_max_lr": 0.1,
     "warmup_num_steps": 9, "warmup_type": "linear"},
     [0.001, 0.001, 0.012, 0.045, 0.078, 0.089, 0.08114285714285716, 0.06228571428571429,
      0.052857142857142866, 0.001, 0.001],
     []),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 9},
     [0.0, 0.0, 0.09463946303571859, 0.21974602810768903, 0.2839183891071558, 0.3,
      0.25996178499639644, 0.1833898022794378, 0.13880660691344016, 3e-05, 3e-05],
     []),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 9, "warmup_min_ratio": 0.1,
     "cos_min_ratio": 0.2, "warmup_type": "linear"},
     [0.0, 0.03, 0.06, 0.15, 0.24, 0.26999999999999996, 0.26796622461957914, 0.20670251207475773,
      0.17103238876962912, 0.06, 0.06],
     []),
]
"""Schedule, arguments, and what DeepSpeed 0.19.8 sets (rate, first beta) over AdamW with a rate of 0.3."""
# fmt: on


def adamw(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])


@pytest.mark.parametrize(("name", "arguments", "rates", "betas"), TABLE)
def test_a_step_sets_what_deepspeed_sets(
    name: str, arguments: dict[str, Any], rates: list[float], betas: list[float]
) -> None:
    optimizer = adamw(0.3)
    schedule = getattr(lr_schedules, name)(optimizer, **arguments)
    seen = [(optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0])]
    for _ in range(max(AT)):
        schedule.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
        assert schedule.get_last_lr() == [seen[-1][0]]
    assert [seen[steps][0] for steps in AT] == pytest.approx(rates, rel=1e-14, abs=0)
    if betas:
        assert [seen[steps][1] for steps in AT] == pytest.approx(betas, rel=1e-14, abs=0)


def test_a_warmup_rises_along_a_logarithm_to_each_groups_own_rate() -> None:
    optimizer = adamw(0.5, 2.0)
    schedule = WarmupLR(optimizer, warmup_num_steps=20)
    for iteration in range(20):
        schedule.step()
        share = math.log(iteration + 1) / math.log(20)
        assert schedule.get_lr() == pytest.approx([0.5 * share, 2.0 * share])
    schedule.step()
    assert schedule.get_lr() == [0.5, 2.0]


def test_the_cycle_of_momentum_begins_at_its_top_but_the_first_step_has_the_bottom() -> None:
    schedule = OneCycle(adamw(0.3), 0.01, 0.1, cycle_first_step_size=4, cycle_min_mom=0.7, cycle_max_mom=0.9)
    assert schedule.get_mom() == [(0.9, 0.99)]
    assert schedule.optimizer.param_groups[0]["betas"] == (0.7, 0.99)
    for height in (0.25, 0.5, 0.75, 1.0):
        schedule.step()
        assert schedule.get_mom() == [(pytest.approx(0.9 - 0.2 * height), 0.99)]
        assert [schedule.optimizer.param_groups[0]["betas"]] == schedule.get_mom()


def test_each_argument_of_a_schedule_is_a_constant() -> None:
    """Scripts write a section "params" with them."""
    arguments = {
        name for each in VALID_LR_SCHEDULES for name in signature(vars(lr_schedules)[each]).parameters
    }
    arguments -= {"optimizer", "last_batch_iteration"}
    assert len(arguments) == 23 and "warmup_num_steps" in arguments
    assert {name: vars(lr_schedules).get(name.upper()) for name in arguments} == {x: x for x in arguments}


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_a_loaded_schedule_goes_on_where_the_saved_one_was(name: str) -> None:
    needed = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 4},
        "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 4},
        "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 4},
    }.get(name, {})
    first, second = (getattr(lr_schedules, name)(adamw(0.3), **needed) for _ in range(2))
    for _ in range(7):
        first.step()
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert first.get_last_lr() == second.get_last_lr()
    assert first.optimizer.param_groups[0]["betas"] == second.optimizer.param_groups[0]["betas"]


def test_a_schedule_that_goes_on_has_no_rate_before_its_first_step() -> None:
    schedule = WarmupLR(adamw(0.3), last_batch_iteration=3)
    with pytest.raises(AssertionError, match="need to call step"):  # which Trainer catches by these words
        schedule.get_last_lr()
    schedule.step()
    assert schedule.get_last_lr() == schedule.get_lr()


def test_a_rate_that_is_a_tensor_is_written_into() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.25))
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupCosineLR(optimizer, total_num_steps=10, warmup_num_steps=2, cos_min_ratio=0.0)
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.25 * (1 + math.cos(math.pi / 8)) / 2)


class Facade:
    """An optimizer that is none of torch's."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 1.0, "betas": (0.9, 0.99)}]


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_what_is_steered_is_an_optimizer_or_wraps_one_or_has_groups() -> None:
    inner = adamw(0.3)
    assert WarmupLR(Wrapper(inner)).optimizer is inner
    facade = Facade()
    OneCycle(facade, 0.1, 0.2).step()
    assert facade.param_groups[0]["lr"] > 0.1
    with pytest.raises(TypeError, match="int, which is no torch optimizer"):
        WarmupLR(3)


def test_without_betas_momentum_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5)
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=3)
    schedule.step()
    assert schedule.get_mom() is None and "SGD has no betas" in capsys.readouterr().out
    assert optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=0), "warmup_num_steps=0 is no number of steps"),
        (lambda o: WarmupLR(o, warmup_num_steps=2.5), "warmup_num_steps=2.5 is no number"),
        (
            lambda o: WarmupLR(o, warmup_min_lr=[1, 2]),
            "warmup_min_lr has 2 values, and the optimizer 1 groups",
        ),
        (lambda o: WarmupCosineLR(o, 9, warmup_num_steps=-1), "warmup_num_steps=-1"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "lr_range_test_step_size=0"),
        (lambda o: LRRangeTest(o, lr_range_test_min_lr=[]), "lr_range_test_min_lr has 0 values"),
        (
            lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=0),
            "cycle_first_step_size .* are 0.0 and 0.0",
        ),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_second_step_size=-1), "are 2000.0 and -1.0 steps"),
        (lambda o: OneCycle(o, 0.1, [1, 2]), "cycle_max_lr has 2 values"),
    ],
)
def test_arguments_that_cannot_be_are_value_errors(make: Any, message: str) -> None:
    optimizer = adamw(0.3)
    with pytest.raises(ValueError, match=message):
        make(optimizer)


def test_a_decay_that_is_shorter_than_its_warmup_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    WarmupDecayLR(adamw(0.3), total_num_steps=3, warmup_num_steps=9, warmup_type="odd")
    said = capsys.readouterr().out
    assert "total_num_steps=3, inside of its warmup of warmup_num_steps=9" in said
    assert "warmup_type 'odd' is unknown" in said
