"""The table of a step: built for every schedule and size, complete and without deadlock, or refused."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.errors import PolyremeError
from polyreme.pipeline.schedule import (
    MESSAGES,
    NAMES,
    Action,
    Name,
    Schedule,
    arrivals,
    build,
    check,
    halves,
    next_backwards,
    other_end,
    peak_activations,
    stage_ranks,
)

SHAPES: dict[str, Any] = {
    "name": st.sampled_from(NAMES),
    "pp": st.integers(1, 16),
    "microbatches": st.integers(1, 64),
    "virtual": st.integers(2, 4),
}
SMALL = SHAPES | {"pp": st.integers(1, 5), "microbatches": st.integers(1, 7), "virtual": st.just(2)}


def accepted(schedule: Schedule, microbatches: int) -> bool:
    try:
        check(schedule, microbatches)
    except PolyremeError:
        return False
    return True


def execute(schedule: Schedule, microbatches: int, seed: int) -> bool:
    """Whether the table trains, by other means than `check`: sends go into one queue for each ordered pair of
    ranks, receives take what comes next there, ranks move in random order, and what is computed says from
    what."""
    rank_of = {action.stage: rank for rank, row in enumerate(schedule) for action in row if action.op == "F"}
    halved, last = halves(schedule), max(rank_of)
    queues: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    values: dict[Action, Any] = {}
    received: dict[Action, int] = {}  # a posted receive, by its number in the queue
    arrived: dict[tuple[int, int], list[Any]] = defaultdict(list)
    posted: dict[tuple[int, int], int] = defaultdict(int)
    at = [0] * len(schedule)

    def value(rank: int, source: Action, receive: Action) -> Any:
        if rank_of[source.stage] == rank:
            return values[source]
        pair = (rank_of[source.stage], rank)
        while len(arrived[pair]) <= received[receive]:
            arrived[pair].append(queues[pair].popleft())  # IndexError: not sent yet
        return arrived[pair][received[receive]]

    def perform(rank: int, action: Action) -> None:
        op, stage, i = action
        if op in ("SA", "SG"):
            queues[rank, rank_of[other_end(action).stage]].append(
                values[Action("F" if op == "SA" else "B", stage, i)]
            )
        elif op in ("RA", "RG"):
            pair = (rank_of[other_end(action).stage], rank)
            received[action], posted[pair] = posted[pair], posted[pair] + 1
        elif op == "F":
            values[action] = (
                (*value(rank, Action("F", stage - 1, i), Action("RA", stage, i)), stage) if stage else (i, 0)
            )
        elif op == "B":
            own = values[Action("F", stage, i)]
            values[action] = (
                own if stage == last else value(rank, Action("B", stage + 1, i), Action("RG", stage, i))
            )
        elif op == "W":
            values[action] = values[Action("B", stage, i)]
        elif op == "R":
            whole = [Action("B", stage, i) for i in range(microbatches)]
            values[action] = [values[b._replace(op="W") if b in halved else b] for b in whole]
        else:
            values[action] = [values[Action("R", s)] for s, r in rank_of.items() if r == rank]

    order, moved = random.Random(seed), True
    while moved:
        moved = False
        for rank in order.sample(range(len(schedule)), len(schedule)):
            for _ in range(order.randint(1, 5)):
                if at[rank] == len(schedule[rank]):
                    break
                try:
                    perform(rank, schedule[rank][at[rank]])
                except (IndexError, KeyError):
                    break
                at[rank] += 1
                moved = True
    whole = [(i, *range(last + 1)) for i in range(microbatches)]
    return all(
        values.get(Action("U", rank)) == [whole] * list(rank_of.values()).count(rank)
        for rank in range(len(schedule))
    )


def activation_limits(name: Name, pp: int, microbatches: int, virtual: int = 2) -> tuple[int, ...]:
    """The number, for each rank, of micro-batches whose activations (of one stage each) it keeps at once, at
    most."""
    chunks = len(stage_ranks(name, pp, virtual)) // pp
    limits = {
        "gpipe": lambda rank: microbatches,
        "1f1b": lambda rank: pp - rank,
        "1f1b-w": lambda rank: pp - rank + (rank < pp - 1),
        "interleaved": lambda rank: 2 * (pp - 1 - rank) + (chunks - 1) * pp + 1,
        "zb-h1": lambda rank: pp,
        "zb-v": lambda rank: 2 * pp,
    }
    return tuple(min(chunks * microbatches, limits[name](rank)) for rank in range(pp))


@given(**SHAPES)
@examples(150)
def test_every_schedule_is_valid_and_within_its_memory(
    name: Name, pp: int, microbatches: int, virtual: int
) -> None:
    schedule = build(name, pp, microbatches, virtual)
    limits = activation_limits(name, pp, microbatches, virtual)
    check(schedule, microbatches)
    kept = tuple(map(peak_activations, schedule))
    assert all(peak <= limit for peak, limit in zip(kept, limits, strict=True))
    if microbatches % pp == 0 and microbatches >= 2 * pp:  # the limit is no wider than it must be
        assert kept == limits


@given(**SHAPES, seed=st.integers(0, 9))
@examples(40)
def test_every_schedule_computes_what_it_should(
    name: Name, pp: int, microbatches: int, virtual: int, seed: int
) -> None:
    assert execute(build(name, pp, microbatches, virtual), microbatches, seed)


@given(**SHAPES)
@examples(60)
def test_messages_of_two_ranks_stand_in_one_order_and_few_receives_wait(
    name: Name, pp: int, microbatches: int, virtual: int
) -> None:
    schedule = build(name, pp, microbatches, virtual)
    ranks = stage_ranks(name, pp, virtual)
    # (rank, peer): sends, or the sends that receives belong to
    between: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule):
        waiting, present = 0, frozenset(row)
        for action in row:
            if action.op in MESSAGES:
                peer = ranks[other_end(action).stage]
                assert peer in ((rank - 1) % pp, (rank + 1) % pp)
                between[rank, peer].append(action if action.op in ("SA", "SG") else other_end(action))
                waiting += action.op in ("RA", "RG")
            elif (receive := {"F": "RA", "B": "RG"}.get(action.op)) and action._replace(
                op=receive
            ) in present:
                waiting -= 1
            assert waiting <= {"interleaved": 5, "1f1b-w": 3, "zb-v": 3}.get(name, 2)
    assert all(between[rank, peer] == between[peer, rank] for rank, peer in list(between))


def test_tables_as_published() -> None:
    def computes(name: Name, pp: int, microbatches: int) -> list[str]:
        return [
            " ".join(str(a) for a in row if a.op in ("F", "B", "W")) for row in build(name, pp, microbatches)
        ]

    assert computes("gpipe", 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert computes("1f1b", 2, 3) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert computes("interleaved", 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert computes("1f1b-w", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2 1W2"]
    # but for a B and its W that nothing comes between, and whose gradient no other rank waits for: a whole
    # backward
    assert computes("zb-h1", 2, 3) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2"]
    assert computes("zb-v", 2, 3) == [
        "0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 3F2 3B2 3W2 0B1 0B2",
        "1F0 2F0 1F1 2F1 2B0 1F2 1B0 1W0 2F2 2B1 1B1 2B2 1B2 1W1 2W2 1W2",
    ]


def test_a_whole_table() -> None:
    assert [" ".join(map(str, row)) for row in build("1f1b", 2, 2)] == [
        "0F0 0SA0 0F1 0SA1 0RG0 0B0 0RG1 0B1 0R 0U",
        "1RA0 1RA1 1F0 1B0 1SG0 1F1 1B1 1SG1 1R 1U",
    ]


def test_ranks_of_stages() -> None:
    assert stage_ranks("1f1b", 3) == stage_ranks("gpipe", 3) == stage_ranks("zb-h1", 3) == (0, 1, 2)
    assert stage_ranks("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks("zb-v", 3) == (0, 1, 2, 2, 1, 0)


@given(st.integers(1, 40))
def test_one_stage(microbatches: int) -> None:
    schedule = build("1f1b", 1, microbatches)
    check(schedule, microbatches)
    assert [str(action) for action in schedule[0]] == [
        f"0{op}{i}" for i in range(microbatches) for op in "FB"
    ] + ["0R", "0U"]


@given(st.integers(1, 8), st.data())
def test_every_possible_order_of_one_stage_is_accepted_and_no_other(
    microbatches: int, data: st.DataObject
) -> None:
    row = data.draw(st.permutations(build("1f1b", 1, microbatches)[0]))
    at = {action: i for i, action in enumerate(row)}
    possible = (
        all(at[Action("F", 0, i)] < at[Action("B", 0, i)] < at[Action("R", 0)] for i in range(microbatches))
        and at[Action("R", 0)] < at[Action("U", 0)]
    )
    assert accepted((tuple(row),), microbatches) == possible


# ---- what check refuses


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return tuple(tuple(row) if r == rank else old for r, old in enumerate(schedule))


@given(**SMALL, data=st.data())
@examples(100)
def test_nothing_may_be_missing_or_done_twice(
    name: Name, pp: int, microbatches: int, virtual: int, data: st.DataObject
) -> None:
    schedule = build(name, pp, microbatches, virtual)
    rank = data.draw(st.integers(0, pp - 1))
    row = list(schedule[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    shorter = changed(schedule, rank, row[:at] + row[at + 1 :])
    # Without its W, a B is the whole backward: another step, and a complete one.
    assert accepted(shorter, microbatches) == (row[at].op == "W")
    again = data.draw(st.integers(at, len(row)))
    assert not accepted(changed(schedule, rank, [*row[:again], row[at], *row[again:]]), microbatches)


NEEDS = {("F", "SA"), ("B", "SG"), ("RA", "F"), ("RG", "B"), ("F", "B"), ("B", "W"), ("F", "W")}


def must_follow(first: Action, second: Action, ranks: tuple[int, ...]) -> bool:
    """Whether `second` can only come after `first` in a row: it needs it, or they are messages that follow
    each other the same way."""
    if first.op in MESSAGES and second.op in MESSAGES:
        ends = [(action.op[0], ranks[other_end(action).stage]) for action in (first, second)]
        return ends[0] == ends[1]
    own = (first.stage, first.microbatch) == (second.stage, second.microbatch) and (
        first.op,
        second.op,
    ) in NEEDS
    return (
        own
        or second.op == "U"
        or (second.op == "R" and first.op in ("B", "W") and first.stage == second.stage)
    )


@given(**SMALL, data=st.data())
@examples(250)
def test_a_swap_is_refused_unless_harmless(
    name: Name, pp: int, microbatches: int, virtual: int, data: st.DataObject
) -> None:
    schedule = build(name, pp, microbatches, virtual)
    rank = data.draw(st.integers(0, pp - 1))
    row = list(schedule[rank])
    i, j = sorted(data.draw(st.lists(st.integers(0, len(row) - 1), min_size=2, max_size=2, unique=True)))
    row[i], row[j] = row[j], row[i]
    swapped = changed(schedule, rank, row)
    if must_follow(row[j], row[i], stage_ranks(name, pp, virtual)):
        assert not accepted(swapped, microbatches)
    elif accepted(swapped, microbatches):
        assert execute(swapped, microbatches, seed=i)


def test_messages_out_of_order_are_refused() -> None:
    for name in NAMES:
        schedule = build(name, 3, 6)
        for rank, row in enumerate(schedule):
            sends = [i for i, action in enumerate(row) if action.op in MESSAGES]
            for i, j in pairwise(sends):
                if must_follow(row[i], row[j], stage_ranks(name, 3)):
                    other = list(row)
                    other[i], other[j] = row[j], row[i]
                    assert not accepted(changed(schedule, rank, other), 6)
                    assert not execute(changed(schedule, rank, other), 6, seed=i)


def test_the_error_names_row_action_and_reason() -> None:
    table = build("1f1b", 2, 2)

    def refused(row: int, text: str) -> str:
        actions = {str(action): action for r in table for action in r}
        with pytest.raises(PolyremeError) as caught:
            check(changed(table, row, [actions[word] for word in text.split()]), 2)
        return str(caught.value)

    good = "1RA0 1RA1 1F0 1B0 1SG0 1F1 1B1 1SG1 1R 1U"
    assert accepted(changed(table, 1, list(table[1])), 2)
    assert refused(1, good.replace("1SG0 ", "")) == "row 1 of the schedule lacks 1SG0"
    assert (
        refused(1, good.replace("1RA0 1RA1 1F0", "1F0 1RA0 1RA1"))
        == "row 1 of the schedule: 1F0 needs 1RA0 first"
    )
    assert refused(1, good.replace("1R 1U", "1U 1R")) == "row 1 of the schedule: 1U needs 1R first"
    assert refused(1, good.replace("1F1", "1F1 1F1")) == "row 1 of the schedule: 1F1 is done twice"
    assert refused(1, good + " 0SA0").startswith("row 1 of the schedule: 0SA0 has no place in it")
    assert refused(1, good + " 0F0") == "row 1 of the schedule: 0F0 is of a stage that row 0 computes"
    assert refused(1, good.replace("1RA1 1F0 1B0 1SG0", "1F0 1B0 1SG0 1RA1")) == (
        "deadlock in the schedule: row 0 stands at 0SA1 and waits for 1RA1 of row 1, which stands at 1SG0"
    )
    with pytest.raises(PolyremeError, match="no row of the schedule computes stage 0"):
        check((table[1],), 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dualpipe", 2, 2), "'dualpipe': choose one of gpipe"),
        (("1f1b", 0, 2), "pp = 0"),
        (("1f1b", 2, 0), "microbatches = 0"),
        (("interleaved", 2, 2, 1), "virtual = 1: it must be at least 2"),
    ],
)
def test_a_schedule_that_cannot_be_built(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(PolyremeError, match=words):
        build(*arguments)


def test_the_next_backward() -> None:
    row = build("1f1b", 2, 3)[0]  # F0 F1 B0 F2 B1 B2
    found = next_backwards(row)
    assert [found[action] for action in row if action in found] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (0, 2),
        None,
    ]


@given(**SHAPES)
def test_sends_have_arrived_when_an_answer_that_was_sent_later_is_used(
    name: Name, pp: int, microbatches: int, virtual: int
) -> None:
    schedule, ranks = build(name, pp, microbatches, virtual), stage_ranks(name, pp, virtual)
    place = {(rank, action): at for rank, row in enumerate(schedule) for at, action in enumerate(row)}

    def use(send: Action) -> Action:
        end = other_end(send)
        return Action("F" if end.op == "RA" else "B", end.stage, end.microbatch)

    for rank, row in enumerate(schedule):
        found = arrivals(schedule, rank, ranks)
        told = [send for sends in found.values() for send in sends]
        assert len(told) == len({*told}) and {*told} <= {a for a in row if a.op in ("SA", "SG")}
        for needs, sends in found.items():
            message = other_end(Action("RA" if needs.op == "F" else "RG", needs.stage, needs.microbatch))
            other = ranks[message.stage]
            for send in sends:
                assert place[rank, send] < place[rank, needs]
                assert place[other, use(send)] < place[other, message]
        kept = most = 0
        for action in row:
            kept += (action.op in ("SA", "SG")) - len(found.get(action, ()))
            most = max(most, kept)
        if name != "gpipe":  # which sends all activations before an answer comes
            assert most <= 2 * (2 * pp + (virtual - 1) * pp * (name == "interleaved")) + 2
