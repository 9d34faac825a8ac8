"""The table of a step: complete and in a possible order, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.errors import PolyremeError
from polyreme.pipeline.run import run
from polyreme.pipeline.schedule import Action, Schedule, check, single_stage


@given(st.integers(1, 40))
@settings(deadline=None)
def test_one_stage(microbatches: int) -> None:
    schedule = single_stage(microbatches)
    check(schedule, microbatches)
    (row,) = schedule
    done: list[str] = []
    run(row, {op: lambda action: done.append(str(action)) for op in ("F", "B", "R", "U")})  # type: ignore[misc]
    assert done == [f"0{op}{i}" for i in range(microbatches) for op in "FB"] + ["0R", "0U"]


@given(st.integers(1, 8), st.data())
@settings(deadline=None)
def test_every_possible_order_is_accepted_and_no_other(microbatches: int, data: st.DataObject) -> None:
    row = data.draw(st.permutations(single_stage(microbatches)[0]))
    at = {action: i for i, action in enumerate(row)}
    possible = (
        all(at[Action("F", 0, i)] < at[Action("B", 0, i)] < at[Action("R", 0)] for i in range(microbatches))
        and at[Action("R", 0)] < at[Action("U", 0)]
    )
    assert accepted((tuple(row),), microbatches) == possible


@given(st.integers(1, 8), st.data())
@settings(deadline=None)
def test_nothing_may_be_missing_or_done_twice(microbatches: int, data: st.DataObject) -> None:
    row = list(single_stage(microbatches)[0])
    at = data.draw(st.integers(0, len(row) - 1))
    assert not accepted((tuple(row[:at] + row[at + 1 :]),), microbatches)
    again = data.draw(st.integers(at, len(row)))
    assert not accepted(((*row[:again], row[at], *row[again:]),), microbatches)


def accepted(schedule: Schedule, microbatches: int) -> bool:
    try:
        check(schedule, microbatches)
    except PolyremeError:
        return False
    return True


def test_the_error_names_row_and_action() -> None:
    with pytest.raises(PolyremeError, match=r"row 1 .*0B0 needs 0F0 first"):
        check((single_stage(1)[0], (Action("B", 0, 0),)), 1)
    with pytest.raises(PolyremeError, match=r"row 0 .*never updates"):
        check(((Action("F", 0, 0), Action("B", 0, 0)),), 1)
