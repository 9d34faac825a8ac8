"""What may come next in a step."""

from __future__ import annotations

import pytest

from polyreme.errors import BatchError, OrderError
from polyreme.step.order import NEXT, UNKNOWN, Order, Plan


def test_a_step_ends_by_count() -> None:
    order = Order(Plan(3))
    phases = []
    for last in (False, True, True, False, True):
        order.begin(last)
        phases.append((order.phase, order.microbatches, order.is_over))
    assert phases == [
        ("accumulating", 0, False),
        ("accumulating", 1, False),
        ("accumulating", 2, False),
        ("accumulating", 2, False),
        ("ended", 3, True),
    ]
    with pytest.raises(OrderError, match="ended cannot be accumulating"):
        order.begin()
    order.move("reduced")
    assert order.is_over
    order.restart()
    assert (order.phase, order.microbatches, order.plan) == ("idle", 0, Plan(3))


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_ends_where_it_is_announced(is_last: bool) -> None:
    order = Order(Plan(1))
    order.plan = Plan(1, is_last)
    assert order.plan.announced and order.plan.to_come == (1 if is_last else UNKNOWN)
    order.begin(last=False)  # of one of several losses
    assert order.phase == "accumulating"
    order.begin()
    assert order.is_over == is_last


def test_a_step_that_is_extended_goes_on() -> None:
    order = Order(Plan(1))
    order.begin()
    order.move("reduced")
    order.extend()
    assert (order.phase, order.microbatches) == ("accumulating", 1)


def test_every_other_move_is_refused() -> None:
    legal = {(before, after) for before, every in NEXT.items() for after in every}
    for before in NEXT:
        for after in NEXT:
            order = Order(Plan(1))
            order.phase = before
            if (before, after) in legal:
                order.move(after)
            else:
                with pytest.raises(BatchError, match=f"{before} cannot be {after}"):
                    order.move(after)
