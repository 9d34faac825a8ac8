"""What a kind of rank does and keeps over a simulated step, worked out by hand, and the trace of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from planned import check_trace
from polyreme.pipeline.schedule import Action, build
from polyreme.planner.flops import Flops
from polyreme.planner.hardware import Cluster
from polyreme.planner.over_time import COMPUTE, Kind, trace_events
from polyreme.planner.time_model import BUBBLE, Stretch, step_time, stretches
from polyreme.planner.trace import (
    CATEGORIES,
    Collective,
    Compute,
    Event,
    MemoryTrace,
    Moment,
    RankTrace,
    Segment,
    Transfer,
    Wait,
)

ONE: dict[str, Any] = {"flops": {"bf16": 1.0}, "bandwidth": 1.0}
CLUSTER = Cluster.load(
    {"device": ONE, "inside": {"bandwidth": 1.0}, "between": {"bandwidth": 1.0}, "host": {"bus": 1.0}}
)
"""One FLOP or byte a second."""


def work(seconds: int) -> Compute:
    return Compute("mul", 0, seconds, (), "bfloat16")


def live(activations: int, parameters: int = 10) -> tuple[int, ...]:
    given = {"activations": activations, "parameters": parameters}
    return tuple(given.get(name, 0) for name in CATEGORIES)


def rank(
    row: Sequence[Action],
    events: dict[str, Sequence[Event]],
    ran: Sequence[Action] = (),
    moments: Sequence[Moment] = (),
    place: int = 0,
) -> RankTrace:
    """The rank at a place of a pipeline. events: by what an action does. ran: the actions that were run."""
    segments = (
        Segment(None, ()), *(Segment(each, tuple(events.get(each.op, ()))) for each in ran or row),
    )  # fmt: skip
    memory = MemoryTrace(0, {}, None, "", {}, 0, 0, tuple(moments))
    axes = {"tp": (0, 1), "pp": (0, 1)}
    return RankTrace(place, {"pp": place}, axes, tuple(row), segments, memory, Flops(4, 8, 0), {}, 1)


def kinds_of(traces: Sequence[RankTrace]) -> list[Kind]:
    schedule = [each.row for each in traces]
    seconds = step_time(traces, schedule, CLUSTER).seconds
    return [
        Kind(trace, seconds, cells, its)
        for trace, (its, cells) in zip(traces, stretches(traces, schedule, CLUSTER), strict=True)
    ]


ALONE = (Action("F", 0, 0), Action("B", 0, 0), Action("U", 0, 0))


def test_spans_are_where_the_time_goes() -> None:
    events = [Collective(1, "tp", "all_gather", 5, 2), work(3), Wait(1), work(2)]
    [kind] = kinds_of([rank(ALONE, {"F": events, "B": [work(3)]})])
    assert kind.seconds == pytest.approx(10)
    assert kind.streams["tp"] == [Stretch("tp", "all_gather", pytest.approx(0), pytest.approx(5))]
    assert [(each.start, each.end) for each in kind.streams[COMPUTE]] == [(0, 3), (5, 7), (7, 10)]
    assert kind.waits == {"tp": pytest.approx(2)} and BUBBLE not in kind.streams
    assert kind.busy(COMPUTE, 10) == pytest.approx([1, 1, 1, 0, 0, 1, 1, 1, 1, 1])
    assert kind.busy("tp", 4) == pytest.approx([1, 1, 0, 0])


def test_a_collective_that_waits_its_turn_begins_late_and_one_that_nobody_waits_for_ends() -> None:
    events = [Collective(1, "tp", "all_gather", 2, 2), Collective(2, "tp", "all_reduce", 2, 2)]
    [kind] = kinds_of([rank(ALONE, {"F": [*events, work(1)], "B": [Transfer(3, "host", "out", 1), work(9)]})])
    assert [(each.name, each.start, each.end) for each in kind.streams["tp"]] == [
        ("all_gather", 0, pytest.approx(2)),
        ("all_reduce", pytest.approx(2), pytest.approx(4)),
    ]  # fmt: skip
    assert kind.streams["host out"][0].start == pytest.approx(1)


def test_spans_are_those_of_the_step_that_is_timed() -> None:
    """Computation, waits and bubbles of a rank of a pipeline fill the step, each as the model of time has
    them."""
    schedule = build("1f1b", 2, 4)
    events = {"F": [work(2), Collective(1, "tp", "all_reduce", 2, 2), Wait(1)], "B": [work(4)]}
    traces = [rank(row, events, place=place) for place, row in enumerate(schedule)]
    step = step_time(traces, schedule, CLUSTER)
    for kind, bubble in zip(kinds_of(traces), step.simulation.bubble, strict=True):
        parts = {stream: sum(s.end - s.start for s in its) for stream, its in kind.streams.items()}
        assert parts[COMPUTE] == pytest.approx(4 * 2 + 4 * 4) and kind.waits["tp"] == pytest.approx(
            parts["tp"]
        )
        assert parts[BUBBLE] == pytest.approx(bubble * step.seconds)
        assert parts[COMPUTE] + parts[BUBBLE] + kind.waits["tp"] == pytest.approx(step.seconds)


def test_memory_of_a_step_of_which_all_was_run() -> None:
    moments = [
        Moment(0, 0, live(0)), Moment(1, 1, live(4)), Moment(1, 2, live(6)), Moment(2, 1, live(0)),
    ]  # fmt: skip
    events = {"F": [work(1)] * 2, "B": [work(4)]}
    [kind] = kinds_of([rank(ALONE, events, moments=moments)])
    found = [(each.when, sum(each.live) - 10) for each in kind.memory]
    assert found == [(0, 0), (0, 0), (1, 4), (2, 6), (6, 0)]
    assert [sum(level) - 10 for level in kind.highest(6)] == [0, 4, 6, 6, 6, 6]


def test_micro_batches_that_were_not_run_add_what_they_keep() -> None:
    """Of six micro-batches three were run, as many as rank 0 of three stages has under way. In every forward
    from the third on, and in each backward before the last three, all three are."""
    row, ran = build("1f1b", 3, 6)[0], build("1f1b", 3, 3)[0]
    row, ran = ([each for each in actions if each.op in "FBU"] for actions in (row, ran))
    level, moments = 0, [Moment(0, 0, live(0))]
    for place, action in enumerate(ran, 1):
        level += {"F": 5, "B": -5}.get(action.op, 0)
        moments.append(Moment(place, 1, live(level)))
    trace = rank(row, {"F": [work(1)], "B": [work(2)]}, ran, moments)
    [(its, cells)] = stretches([trace], [tuple(row)], CLUSTER)
    kind = Kind(trace, 18.0, cells, its)
    under_way, wanted = 0, []
    for action in row:
        under_way += {"F": 1, "B": -1}.get(action.op, 0)
        wanted.append(5 * under_way)
    assert [sum(each.live) - 10 for each in kind.memory[2:]] == wanted
    assert max(wanted) == 15 and wanted.count(15) == 4


def test_the_trace_is_one_of_the_trace_event_format() -> None:
    schedule = build("1f1b", 2, 3)
    events: dict[str, Sequence[Event]] = {
        "F": [
            Transfer(2, "host", "in", 1),
            work(2),
            Collective(1, "tp", "all_reduce", 2, 2),
            Wait(1),
            Wait(2),
        ],
        "B": [work(4)],
        "SA": [Collective(3, "pp", "send", 3, 2)],
        "RA": [Collective(4, "pp", "receive", 3, 2)],
    }
    moments = [Moment(0, 0, live(0)), Moment(1, 1, live(4))]
    traces = [rank(row, events, moments=moments, place=place) for place, row in enumerate(schedule)]
    each_kind = kinds_of([replace(each, rank=4 * place) for place, each in enumerate(traces)])
    check_trace(trace_events(each_kind), each_kind[0].seconds)
    found = trace_events(each_kind)["traceEvents"]
    assert {each["pid"] for each in found} == {0, 4}
    threads = {each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert threads == {"actions", "compute", "axis tp", "axis pp", "host in"}
    assert {"waiting for tp", "all_reduce", "send", "in", "0F0"} <= {e["name"] for e in found}


@given(st.lists(st.floats(1e-9, 1e-3), min_size=1, max_size=40), st.floats(0, 100))
@examples(50)
def test_slices_of_a_thread_follow_each_other_as_perfetto_reads_them(
    seconds: list[float], begin: float
) -> None:
    """Each begins when the one before it ends, at any fraction of a nanosecond."""
    ends = [*itertools.accumulate(seconds, initial=begin)]
    its = [Stretch(COMPUTE, "mul", *each) for each in itertools.pairwise(ends)]
    kind = Kind(rank(ALONE, {}, moments=[Moment(0, 0, live(0))]), ends[-1], [], its)
    found = trace_events([kind])
    slices = [(1e-6 * e["ts"], 1e-6 * e["dur"]) for e in found["traceEvents"] if e["ph"] == "X"]
    long = [each for each in its if each.end - each.start > 4e-9]
    for each in long:
        near = [dur for ts, dur in slices if abs(ts - each.start) < 2e-9]
        assert any(abs(dur - (each.end - each.start)) < 3e-9 for dur in near)
    if long:
        check_trace(found, ends[-1])
