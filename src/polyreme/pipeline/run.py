"""The interpreter: executes one row of a schedule, action by action. The only step path of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polyreme.pipeline.schedule import Action, Op


def run(row: tuple[Action, ...], perform: Mapping[Op, Callable[[Action], None]]) -> None:
    """Perform every action of `row` in order, each by the function that `perform` holds for its operation."""
    for action in row:
        perform[action.op](action)
