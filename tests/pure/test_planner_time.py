"""The time of a step made of a few operators, collectives and transfers, worked out by hand, and what more
bandwidth, more micro-batches and no latency make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.errors import ModelError
from polyreme.pipeline.schedule import MESSAGES, Action, Name, Schedule, build
from polyreme.planner.flops import Flops
from polyreme.planner.hardware import CAUSAL, Cluster
from polyreme.planner.time_model import BUBBLE, ISSUE, SHARING, Timeline, step_time
from polyreme.planner.trace import Collective, Compute, Event, MemoryTrace, RankTrace, Segment, Transfer, Wait

MEMORY = MemoryTrace(0, {}, None, "", {}, 0, 0, ())
TOKENS = 1000
ALONE = (Action("F", 0, 0), Action("B", 0, 0), Action("U", 0, 0))


def cluster(device: dict[str, Any] | None = None, **given: Any) -> Cluster:
    """One FLOP or byte a second, and nothing else takes time."""
    one: dict[str, Any] = {"flops": {"bf16": 1.0}, "bandwidth": 1.0, **(device or {})}
    links = {"inside": {"bandwidth": 1.0}, "between": {"bandwidth": 1.0}}
    return Cluster.load({"device": one, **links, **given})


def work(seconds: int) -> Compute:
    return Compute("mul", 0, seconds, (), "bfloat16")


def trace(
    row: Sequence[Action], events: dict[str, Sequence[Event]], place: int = 0, flops: int = 12, **given: Any
) -> RankTrace:
    """The rank at a place of the pipeline. events: by what an action does; "" before the row."""
    before = [Segment(None, tuple(events[""]))] if "" in events else []
    segments = (*before, *(Segment(each, tuple(events.get(each.op, ()))) for each in row))
    axes = {"tp": (0, 1), "loss": (0, 8)}
    counts = Flops(flops // 3, 2 * flops // 3, 0)
    return RankTrace(place, {"pp": place}, axes, tuple(row), segments, MEMORY, counts, {}, TOKENS, **given)


def alone(events: Sequence[Event], on: Cluster, **options: Any) -> Timeline:
    """The step of a rank that does this in its forward, and nothing else."""
    return step_time([trace(ALONE, {"F": events})], (ALONE,), on, **options)


def pipeline(name: Name, pp: int, microbatches: int, forward: int, backward: int) -> tuple[Any, Schedule]:
    schedule = build(name, pp, microbatches, 2)
    given = {"F": [work(forward)], "B": [work(backward)], "W": [work(1)]}
    return [trace(row, given, place) for place, row in enumerate(schedule)], schedule


# ---- one rank


def test_operators_follow_each_other() -> None:
    step = alone([work(3), Compute("mm", 16, 2, (1, 2, 2, 2), "bfloat16")], cluster())
    assert step.seconds == pytest.approx(3 + 16)
    assert step.tokens_per_second == pytest.approx(TOKENS / 19)
    assert step.mfu == step.hfu == pytest.approx(12 / 19)
    assert step.tflops == pytest.approx(12e-12 / 19)
    assert step.limit == "matrix products: 84% of the step"
    assert step.path[0][:2] == ("stage 0 F", 1)


def test_what_moves_more_than_it_computes_is_limited_by_memory() -> None:
    product = Compute("mm", 16, 40, (1, 2, 2, 2), "bfloat16")
    assert alone([product], cluster()).limit == "memory traffic: 100% of the step"


def test_attention_computes_the_causal_part_of_its_square() -> None:
    forward, backward = (
        Compute(f"flash_attention{name}", 100, 1, (), "bfloat16", True) for name in ("", "_backward")
    )
    on = cluster({"attention": 0.5, "attention_backward": 0.25})
    assert alone([forward], on).seconds == pytest.approx(100 * CAUSAL / 0.5)
    assert alone([backward], on).seconds == pytest.approx(100 * CAUSAL / 0.25)
    assert alone([forward._replace(causal=False)], on).seconds == pytest.approx(100 / 0.5)


def test_a_collective_hides_behind_operators_until_it_is_waited_for() -> None:
    gather = Collective(1, "tp", "all_gather", 5, 2)
    hidden = alone([gather, work(7), Wait(1), work(2)], cluster())
    assert (hidden.seconds, hidden.exposed) == (pytest.approx(9), {"tp": 0})
    late = alone([gather, work(3), Wait(1), work(2)], cluster())
    assert late.seconds == pytest.approx(7) and late.exposed["tp"] == pytest.approx(2)
    assert late.spent["waiting for tp"] == late.exposed["tp"]
    assert alone([gather, work(3), Wait(1)], cluster(), overlapped=("tp",)).seconds == pytest.approx(3)


def test_collectives_of_an_axis_follow_each_other_and_those_of_two_share_a_link() -> None:
    first, second = (Collective(number, "tp", "all_gather", 5, 2) for number in (1, 2))
    other = Collective(2, "loss", "all_gather", 5, 2)
    on = cluster(ranks_per_host=16)
    assert alone([first, second, Wait(1)], on).seconds == pytest.approx(5)
    assert alone([first, second, Wait(2)], on).seconds == pytest.approx(10)
    assert alone([first, other, Wait(1)], on).seconds == pytest.approx(10)
    apart = cluster(ranks_per_host=8)  # ranks 0 and 8 are on two hosts
    assert alone([first, other, Wait(1), Wait(2)], apart).seconds == pytest.approx(5)


def test_operators_are_slower_while_collectives_take_units() -> None:
    device = {"units": 4, "collective_units": 1}
    step = alone([Collective(1, "tp", "all_gather", 30, 2), work(30), Wait(1)], cluster(device))
    assert step.spent[SHARING] == pytest.approx(10) and step.seconds == pytest.approx(40)


def test_transfers_of_both_directions_pass_at_once() -> None:
    host = {"bus": 1.0, "bandwidth": 100.0, "read": 1.0, "write": 1.0}
    on = cluster(host=host, ranks_per_host=1)
    events = [Transfer(1, "host", "in", 6), Transfer(2, "host", "out", 6), work(2), Wait(1), Wait(2)]
    step = alone(events, on)
    assert (step.seconds, step.transfers) == (pytest.approx(6), pytest.approx(4))


def test_a_host_that_issues_slowly_is_what_limits() -> None:
    step = alone([work(1)] * 10, cluster({"dispatch": 3.0}))
    assert step.seconds == pytest.approx(31) and step.spent[ISSUE] == pytest.approx(21)
    assert step.limit.startswith(ISSUE)
    ahead = alone([work(100), *[work(1)] * 10], cluster({"dispatch": 3.0}))
    assert ahead.seconds == pytest.approx(3 + 110)


def test_fused_operators_move_as_much_as_the_largest() -> None:
    events = [work(2), work(6), work(3), Compute("mm", 16, 2, (1, 2, 2, 2), "bfloat16"), work(4)]
    assert alone(events, cluster()).seconds == pytest.approx(15 + 16)
    assert alone(events, cluster(), fused=True).seconds == pytest.approx(6 + 16 + 4)


def test_what_is_before_and_after_the_row_is_part_of_the_step() -> None:
    given = trace(ALONE, {"": [work(5)], "F": [work(1)], "U": [work(2)]})
    assert step_time([given], (ALONE,), cluster()).seconds == pytest.approx(8)


def test_no_trace_is_refused() -> None:
    with pytest.raises(ModelError, match="give the trace of one rank"):
        step_time([], (ALONE,), cluster())


# ---- properties

EVENT = st.one_of(
    st.builds(work, st.integers(0, 50)),
    st.builds(
        Collective,
        st.just(0),
        st.sampled_from(["tp", "loss"]),
        st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
        st.integers(1, 50),
        st.just(2),
    ),
    st.builds(Transfer, st.just(0), st.just("host"), st.sampled_from(["in", "out"]), st.integers(1, 50)),
)


@st.composite
def steps(draw: st.DrawFn) -> list[Event]:
    """Events that begin in this order, each with a wait somewhere after it."""
    found: list[Event] = []
    for number, event in enumerate(draw(st.lists(EVENT, max_size=12))):
        begun = event if isinstance(event, Compute) else event._replace(number=number)  # type: ignore[union-attr]
        found.append(begun)
        if not isinstance(event, Compute):
            found.append(Wait(number))
    for index in range(len(found) - 1, -1, -1):  # waits go on until later
        if isinstance(found[index], Wait):
            found.insert(draw(st.integers(index, len(found) - 1)), found.pop(index))
    return found


def computed(events: Sequence[Event]) -> int:
    return sum(each.bytes for each in events if isinstance(each, Compute))


@given(events=steps(), faster=st.floats(1, 50), what=st.sampled_from(["inside", "between", "bus", "device"]))
@examples(100)
def test_more_bandwidth_is_never_slower(events: list[Event], faster: float, what: str) -> None:
    def on(factor: float) -> Cluster:
        rates = dict.fromkeys(("inside", "between", "bus", "device"), 1.0) | {what: factor}
        links = {name: {"bandwidth": rates[name], "latency": 0.5} for name in ("inside", "between")}
        host = {"bus": rates["bus"], "bandwidth": 1e6, "read": 1.0, "write": 1.0}
        return cluster({"bandwidth": rates["device"]}, host=host, **links)

    slow, fast = alone(events, on(1.0)), alone(events, on(faster))
    assert fast.seconds <= slow.seconds * (1 + 1e-9)
    assert computed(events) <= slow.seconds * (1 + 1e-9)
    assert sum(slow.spent.values()) == pytest.approx(slow.seconds)


@given(events=steps())
@examples(60)
def test_links_without_latency_and_end_leave_only_what_is_computed(events: list[Event]) -> None:
    endless = {"bandwidth": 1e30}
    host = {"bus": 1e30, "bandwidth": 1e30, "read": 1e30, "write": 1e30}
    step = alone(events, cluster(inside=endless, between=endless, host=host))
    assert step.seconds == pytest.approx(computed(events), abs=1e-9)
    assert sum(step.exposed.values()) + step.transfers == pytest.approx(0, abs=1e-9)


# ---- pipelines


@given(
    name=st.sampled_from(["gpipe", "1f1b"]), pp=st.integers(1, 6), microbatches=st.integers(1, 16),
    forward=st.integers(1, 9), backward=st.integers(1, 9),
)  # fmt: skip
@examples(40)
def test_bubble_of_even_stages(name: Name, pp: int, microbatches: int, forward: int, backward: int) -> None:
    """(p - 1) / (m + p - 1), as of the table alone."""
    traces, schedule = pipeline(name, pp, microbatches, forward, backward)
    step = step_time(traces, schedule, cluster())
    assert step.seconds == pytest.approx((microbatches + pp - 1) * (forward + backward))
    assert step.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert step.spent[BUBBLE] == pytest.approx((pp - 1) * (forward + backward))
    # one rank of each kind, or one alone, is enough where all do the same
    assert step_time(traces[:1], schedule, cluster()).seconds == pytest.approx(step.seconds)


def test_micro_batches_that_were_not_run_do_what_the_others_do() -> None:
    traces, few = pipeline("1f1b", 4, 7, 2, 5)
    _, schedule = pipeline("1f1b", 4, 32, 2, 5)
    traces = [replace(each, row=row) for each, row in zip(traces, schedule, strict=True)]
    assert {each.action for each in traces[0].segments} == {*few[0]} < {*schedule[0]}
    assert step_time(traces, schedule, cluster()).seconds == pytest.approx(35 * 7)


def test_a_slow_stage_sets_the_pace_and_is_the_critical_path() -> None:
    traces, schedule = pipeline("1f1b", 3, 8, 1, 2)
    traces[1] = trace(schedule[1], {"F": [work(10)], "B": [work(20)]}, 1)
    step = step_time(traces, schedule, cluster())
    assert step.seconds == pytest.approx(1 + 8 * 30 + 2)
    busy = sum(part.seconds for part in step.path)
    assert busy == pytest.approx(step.seconds)
    assert sum(part.seconds for part in step.path if part.name.startswith("stage 1")) == pytest.approx(240)


def test_messages_take_their_time() -> None:
    schedule = build("gpipe", 2, 1, 2)
    given: dict[str, Sequence[Event]] = {"F": [work(1)], "B": [work(2)]}
    traces = [
        trace(row, given | {op: [Collective(1, "tp", "send", 5, 2)] for op in MESSAGES}, place)
        for place, row in enumerate(schedule)
    ]
    assert step_time(traces, schedule, cluster()).seconds == pytest.approx(1 + 5 + 1 + 2 + 5 + 2)
