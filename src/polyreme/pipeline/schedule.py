"""A training step as a table: one row of actions per pipeline rank. Pure data; `pipeline.executor` executes a
row.

A table is made in two steps. A rule gives the order in which a rank computes (`_pattern`, one line for each
schedule). One function (`_lower`) adds the actions that are the same for all schedules: messages, reductions
and updates.

Invariant: all rows of a built table follow one order of the whole step. Messages between two ranks therefore
have the same order in both rows, in both directions together, and rows never wait for each other in a circle,
even if every send and receive waited for its other end. `check` refuses a table without this property, or an
incomplete one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple, get_args

from polyreme.config.schema import Schedule as Name
from polyreme.errors import PolyremeError

Op = Literal["F", "B", "W", "SA", "RA", "SG", "RG", "R", "U"]
"""F forward, B backward (where the row has its W: the gradients of the inputs only), W gradients of the
weights. SA, RA send and receive activations; SG, RG send and receive their gradients: sends begin and do not
wait; receives are posted, and the F or B that needs the value waits for it. R reduce (the rest of a stage's
gradients), U update."""

NAMES: tuple[Name, ...] = get_args(Name)
TRANSFER = 0.25
"""The time that a message is taken to need when receives are placed, in forwards of a stage. A receive is
posted before the action during which its message would begin to pass, so that the transfer hides behind that
action. A step takes at most about 5% longer than if every receive were posted at the start, while a rank has
no more than two receives posted (zb-v and 1f1b-w: three, interleaved on 16 ranks: five)."""


class Action(NamedTuple):
    """One cell of the table; prints as "2F0": stage 2, forward, micro-batch 0.

    stage: of a send, the stage whose output (SA) or input gradient (SG) is sent; of a receive, the stage that
    needs it; of a U, the rank."""

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]

MESSAGES: dict[Op, tuple[Op, int]] = {"SA": ("RA", 1), "RA": ("SA", -1), "SG": ("RG", -1), "RG": ("SG", 1)}
"""Sends and receives, each with the op of its other end, and how many stages further that is."""


def other_end(message: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    op, step = MESSAGES[message.op]
    return Action(op, message.stage + step, message.microbatch)


def halves(schedule: Sequence[Sequence[Action]]) -> frozenset[Action]:
    """Return every B that computes the gradients of the inputs only, because its row has the W."""
    return frozenset(action._replace(op="B") for row in schedule for action in row if action.op == "W")


def stage_ranks(name: Name, pp: int, virtual: int = 2) -> tuple[int, ...]:
    """Return the rank of each stage. Interleaved: `virtual` rounds over the ranks; zb-v: down the ranks and
    up again; else stage = rank."""
    if name == "zb-v":
        return (*range(pp), *reversed(range(pp)))
    return tuple(range(pp)) * (virtual if name == "interleaved" else 1)


def build(name: Name, pp: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Build the table of a step of `microbatches` on `pp` ranks, any number of either; `virtual` stages on
    each rank if interleaved.

    gpipe: arXiv:1811.06965. 1f1b and interleaved: arXiv:2104.04473. zb-h1: arXiv:2401.10241. zb-v:
    arXiv:2405.15362, two stages a rank. 1f1b-w: 1f1b in which every rank but the last is one more forward
    ahead, so that a message, or an action that takes longer for once, delays no other rank; and a stage sends
    its last gradient on before it computes its weights'. Raises PolyremeError for an unknown name or a number
    that is too small."""
    if name not in NAMES:
        raise PolyremeError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    for what, number, least in (("pp", pp, 1), ("microbatches", microbatches, 1), ("virtual", virtual, 2)):
        if number < least:
            raise PolyremeError(f"a schedule of {what} = {number}: it must be at least {least}")
    ranks = stage_ranks(name, pp, virtual)
    chunks = virtual if name == "interleaved" else 1
    orders = []
    for rank in range(pp):
        stages = [stage for stage, owner in enumerate(ranks) if owner == rank]
        order = [*_order(_pattern(name, pp, rank, microbatches, chunks), stages, pp, microbatches, chunks)]
        if name == "1f1b-w":
            order.append(Action("W", rank, microbatches - 1))
        orders.append(_join(order, ranks))
    return _lower(orders, ranks)


# ---- the order in which a rank computes


def _pattern(name: Name, pp: int, rank: int, m: int, chunks: int) -> str:
    """The order of a rank's actions: each letter is the next action with that op; small letters are for
    zb-v's second stage. Letters beyond the last micro-batch are ignored."""
    after = pp - 1 - rank
    if name == "gpipe":
        return "F" * m + "B" * m
    if name in ("1f1b", "1f1b-w"):
        ahead = name == "1f1b-w" and after > 0
        return "F" * (after + ahead) + "FB" * m
    if name == "interleaved":
        return "F" * (2 * after + (chunks - 1) * pp) + "FB" * (chunks * (m + pp - 1))
    if name == "zb-h1":
        # weight gradients wait until they fill a bubble, as long as no rank keeps more than the first
        return "F" * after + "FB" * rank + "FBW" * m + "W" * rank
    rounds = max(m, 2 * pp - 1) - pp
    warmup = "F" * (2 * after + 1) + "fF" * rank + "fbw" * (after + 1)
    return warmup + "FBWfbw" * rounds + "Bb" * rank + "BW" * (after + 1) + "w" * m + "W" * m


def _order(pattern: str, stages: Sequence[int], pp: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Yield the actions of a pattern. Several chunks take turns of `pp` micro-batches, in a backward from the
    last chunk on; in the last turn, micro-batches that do not exist are left out."""
    turns: Counter[str] = Counter()
    for letter in pattern:
        group, index = divmod(turns[letter], pp * chunks)
        turns[letter] += 1
        chunk, within = divmod(index, pp)
        op: Op = letter.upper()  # type: ignore[assignment]
        stage = stages[1] if letter.islower() else stages[chunk if op == "F" else chunks - 1 - chunk]
        if group * pp + within < microbatches:
            yield Action(op, stage, group * pp + within)


def _join(order: Sequence[Action], ranks: Sequence[int]) -> tuple[Action, ...]:
    """Join a B and its W to a whole backward, where no action is between them and no other rank waits for the
    B's gradient."""
    joined = {
        after
        for action, after in pairwise(order)
        if after == action._replace(op="W") and not _message(action._replace(op="B"), ranks)
    }
    return tuple(action for action in order if action not in joined)


# ---- messages, reductions, updates


def _lower(orders: Sequence[Sequence[Action]], ranks: Sequence[int]) -> Schedule:
    """Build the whole table: enter actions in the order in which they would end, and each message into both
    rows when its sender's action ends.

    A reduction follows the last backward action of its stage.
    """
    halved = halves(orders)
    lasts = {
        a.stage: a for order in orders for a in order if a.op == "W" or (a.op == "B" and a not in halved)
    }
    rows: list[list[Action]] = [[] for _ in orders]
    todo = [deque(order) for order in orders]
    ends: dict[Action, float] = {}
    free = [0.0] * len(orders)

    def end(rank: int) -> float:
        """The time at which the next action of a rank would end; infinite if there is none, or its input is
        not computed yet."""
        if not todo[rank]:
            return inf
        action = todo[rank][0]
        source = _source(action, len(ranks))
        if source is None:
            start = free[rank]
        elif source in ends:
            start = max(free[rank], ends[source] + TRANSFER * (ranks[source.stage] != rank))
        else:
            return inf
        return start + (2 if action.op == "B" and action not in halved else 1)

    nexts = [end(rank) for rank in range(len(orders))]
    while any(todo):
        when = min(nexts)
        rank = nexts.index(when)
        action = todo[rank].popleft()
        free[rank] = ends[action] = when
        rows[rank].append(action)
        for message in _message(action, ranks):
            rows[ranks[message.stage]].append(message)
        if action == lasts[action.stage]:
            rows[rank].append(Action("R", action.stage))
        for each in {rank, *ranks[max(action.stage - 1, 0) : action.stage + 2]}:  # no other rank's changes
            nexts[each] = end(each)
    return tuple((*row, Action("U", rank)) for rank, row in enumerate(rows))


def _source(action: Action, stages: int) -> Action | None:
    """The action of the neighbouring stage whose output this one needs."""
    if action.op == "F" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.op == "B" and action.stage < stages - 1:
        return action._replace(stage=action.stage + 1)
    return None


def _message(action: Action, ranks: Sequence[int]) -> tuple[Action, ...]:
    """The send after an action, and its receive; nothing unless another rank needs the action's result."""
    to = action.stage + {"F": 1, "B": -1}.get(action.op, 0)
    if to in (-1, len(ranks)) or ranks[to] == ranks[action.stage]:
        return ()
    send = action._replace(op="SA" if action.op == "F" else "SG")
    return send, other_end(send)


# ---- the validator


def check(schedule: Schedule, microbatches: int) -> None:
    """Raise PolyremeError, with row, action and reason, unless the table is a whole step without deadlock.

    Whole: at every stage each micro-batch has a forward, then a backward (then its W, if any); each result is
    sent to the rank that needs it, and received before it is used; every stage is reduced after its last
    backward; every row ends with its update. No deadlock: the step would end even if every send waited for
    its receive, and every receive for its send."""
    ranks = _stage_rows(schedule)
    for rank, row in enumerate(schedule):
        _check_row(rank, row, ranks, microbatches)
    _check_messages(schedule, ranks)


def _stage_rows(schedule: Schedule) -> list[int]:
    """The row of each stage."""
    rows: dict[int, int] = {}
    for rank, row in enumerate(schedule):
        for action in row:
            if action.op == "F" and rows.setdefault(action.stage, rank) != rank:
                raise PolyremeError(
                    f"row {rank} of the schedule: {action} is of "
                    f"a stage that row {rows[action.stage]} computes"
                )
    if missing := set(range(len(rows))) - set(rows):
        raise PolyremeError(f"no row of the schedule computes stage {min(missing)}")
    return [rows[stage] for stage in sorted(rows)]


def _check_row(rank: int, row: Sequence[Action], ranks: Sequence[int], microbatches: int) -> None:
    """Check one row by itself: it is complete, has no action twice, and each after those that it needs."""
    needs = _needs(rank, ranks, microbatches, halves([row]))
    present = frozenset(row)
    if lacking := [action for action in needs if action not in present]:
        raise PolyremeError(f"row {rank} of the schedule lacks {lacking[0]}")
    done: set[Action] = set()
    for action in row:
        if action not in needs:
            raise PolyremeError(
                f"row {rank} of the schedule: {action} has no place in "
                f"it (micro-batches: {microbatches}, stages: {len(ranks)})"
            )
        if action in done:
            raise PolyremeError(f"row {rank} of the schedule: {action} is done twice")
        if missing := [need for need in needs[action] if need not in done]:
            raise PolyremeError(f"row {rank} of the schedule: {action} needs {missing[0]} first")
        done.add(action)


def _needs(
    rank: int, ranks: Sequence[int], microbatches: int, halved: Collection[Action]
) -> dict[Action, list[Action]]:
    """Every action that a row must have, with those that must come earlier in the same row."""
    needs: dict[Action, list[Action]] = {}
    for stage in [stage for stage, owner in enumerate(ranks) if owner == rank]:
        for i in range(microbatches):
            forward, backward, weight = Action("F", stage, i), Action("B", stage, i), Action("W", stage, i)
            needs |= {forward: [], backward: [forward]} | ({weight: [backward]} if backward in halved else {})
            for action in (forward, backward):
                if source := _source(action, len(ranks)):
                    receive = _message(source, ranks)[1:]
                    needs |= {message: [] for message in receive}
                    needs[action] += receive or (source,)
                needs |= {message: [action] for message in _message(action, ranks)[:1]}
        needs[Action("R", stage)] = [
            action for action in needs if action.stage == stage and action.op in ("B", "W")
        ]
    return {**needs, Action("U", rank): list(needs)}


def _check_messages(schedule: Schedule, ranks: Sequence[int]) -> None:
    """Run the rows side by side, each message when both of its ends are next. Raises PolyremeError where all
    rows wait."""
    at = [0] * len(schedule)

    def advance(rank: int) -> bool:
        """Perform the next action of a row; False if it must wait, or the row is at its end."""
        if at[rank] == len(schedule[rank]):
            return False
        action = schedule[rank][at[rank]]
        if action.op in MESSAGES:
            end = other_end(action)
            peer = ranks[end.stage]
            if schedule[peer][at[peer]] != end:
                return False
            at[peer] += 1
        at[rank] += 1
        return True

    while any(advance(rank) for rank in range(len(schedule))):
        pass
    for rank, row in enumerate(schedule):
        if at[rank] < len(row):
            end = other_end(row[at[rank]])
            peer = ranks[end.stage]
            raise PolyremeError(
                f"deadlock in the schedule: row {rank} stands at "
                f"{row[at[rank]]} and waits for {end} of row {peer}, "
                f"which stands at {schedule[peer][at[peer]]}"
            )


def peak_activations(row: Sequence[Action], size: Sequence[int] | None = None) -> int:
    """Return the most that a rank keeps at once of forwards whose backward has not ended (with W: whose W has
    not): a number of micro-batches, or the sum of their `size`, given for each stage."""
    halved = halves([row])
    in_flight = peak = 0
    for action in row:
        ends = action.op == "W" or (action.op == "B" and action not in halved)
        in_flight += ((action.op == "F") - ends) * (size[action.stage] if size else 1)
        peak = max(peak, in_flight)
    return peak


def arrivals(schedule: Schedule, rank: int, ranks: Sequence[int]) -> dict[Action, list[Action]]:
    """Return the sends of a row that have arrived when a message comes that their receiver sent later, by the
    F or B that needs that message. ranks: of each stage."""
    found: dict[Action, list[Action]] = {}
    for row in schedule:
        used: list[Action] = []
        for action in row:
            source = _source(action, len(ranks))
            if source is not None and ranks[source.stage] == rank:
                used += _message(source, ranks)[:1]
            elif action.op in ("SA", "SG") and ranks[(end := other_end(action)).stage] == rank:
                found[end._replace(op="F" if end.op == "RA" else "B")] = used
                used = []
    return found


def next_backwards(row: Sequence[Action]) -> dict[Action, tuple[int, int] | None]:
    """Return the stage and micro-batch of the first backward after each F and B of `row`."""
    found: dict[Action, tuple[int, int] | None] = {}
    coming: tuple[int, int] | None = None
    for action in reversed(row):
        if action.op in ("F", "B"):
            found[action] = coming
        if action.op == "B":
            coming = action.stage, action.microbatch or 0
    return found
