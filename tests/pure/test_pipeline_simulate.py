"""The simulator: bubbles as published, times worked out by hand, and transfers that hide behind
computation."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.errors import PolyremeError
from polyreme.pipeline.schedule import NAMES, Action, Name, Schedule, build, halves, stage_ranks
from polyreme.pipeline.simulate import Cell, Costs, simulate

SHAPES: dict[str, Any] = {"pp": st.integers(1, 16), "microbatches": st.integers(1, 64)}


def times(schedule: Schedule, forward: float, backward: float, weight: float = 0.0) -> Costs:
    stages = {action.stage for row in schedule for action in row}
    each = {"F": forward, "B": backward, "W": weight}
    return Costs({(op, stage): time for op, time in each.items() for stage in stages})  # type: ignore[misc]


def total(name: Name, pp: int, microbatches: int, virtual: int = 2) -> float:
    schedule = build(name, pp, microbatches, virtual)
    return simulate(schedule, Costs.even(schedule)).total


@given(
    **SHAPES, name=st.sampled_from(["gpipe", "1f1b"]), forward=st.integers(1, 9), backward=st.integers(1, 9)
)
@examples(60)
def test_bubble_of_gpipe_and_1f1b(
    pp: int, microbatches: int, name: Name, forward: int, backward: int
) -> None:
    """(p-1) / (m+p-1), whatever forward and backward take (arXiv:2104.04473)."""
    schedule = build(name, pp, microbatches)
    simulation = simulate(schedule, times(schedule, forward, backward))
    assert simulation.total == (microbatches + pp - 1) * (forward + backward)
    expected = Fraction(pp - 1, microbatches + pp - 1)
    assert simulation.bubble == pytest.approx([float(expected)] * pp)
    assert simulation.bubble_fraction == pytest.approx(float(expected))


@given(**SHAPES, forward=st.integers(1, 9), backward=st.integers(1, 9), weight=st.integers(1, 9))
@examples(60)
def test_bubble_of_1f1b_with_its_last_weights_late(
    pp: int, microbatches: int, forward: int, backward: int, weight: int
) -> None:
    """Shorter than 1F1B by the last weights where no rank is late for anything else; never longer; and with F
    = B = W always by 1, or for one micro-batch by the weights of every stage but the first."""
    schedule = build("1f1b-w", pp, microbatches)
    costs = times(schedule, forward, backward + weight, weight)
    half = dict.fromkeys(halves(schedule), backward)
    step = simulate(schedule, Costs(costs.duration | half)).total
    whole = (microbatches + pp - 1) * (forward + backward + weight)
    assert whole - weight * (pp - 1) <= step <= whole
    assert total("1f1b-w", pp, microbatches) == 3 * (microbatches + pp - 1) - (
        pp - 1 if microbatches == 1 else pp > 1
    )
    if pp == 2 and (microbatches == 1 or weight <= forward):
        assert step == whole - weight


@given(pp=st.integers(2, 16), rounds=st.integers(2, 4), microbatch=st.integers(0, 60))
@examples(50)
def test_1f1b_with_a_forward_ahead_hides_messages_and_what_takes_longer_once(
    pp: int, rounds: int, microbatch: int
) -> None:
    """Messages cost 1F1B two of their times for each micro-batch of a step with many, and a late forward all
    that it is late; `1f1b-w` on two ranks the first message alone, and of a first rank's forward that takes
    as long as a backward nothing, in the middle of a step."""
    microbatches = rounds * pp

    slow = Action("F", 0, 3 + microbatch % max(microbatches - 4, 1))

    def loss(name: Name, transfer: float = 0.0, late: float = 0.0) -> float:
        """How much longer a step takes with messages that take `transfer`, and one forward that is `late`."""
        schedule = build(name, pp, microbatches)
        even = Costs.even(schedule)
        uneven = Costs({**even.duration, slow: 1 + late}, transfer)
        return simulate(schedule, uneven).total - simulate(schedule, even).total

    assert loss("1f1b-w", transfer=0.125) <= loss("1f1b", transfer=0.125)
    if pp == 2:
        assert loss("1f1b-w", transfer=0.25) == 2 * 0.25
        assert loss("1f1b", transfer=0.25) >= 0.25 * microbatches
        if microbatches > 4:
            assert (loss("1f1b-w", late=1), loss("1f1b", late=1)) == (0, 1)


@given(
    pp=st.integers(1, 16),
    groups=st.integers(1, 4),
    virtual=st.integers(2, 4),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
)
@examples(50)
def test_bubble_of_interleaved(pp: int, groups: int, virtual: int, forward: int, backward: int) -> None:
    """The bubble is 1F1B's divided by v: (p-1) / (v m + p-1) of the step, for m a multiple of p
    (arXiv:2104.04473)."""
    microbatches = groups * pp
    schedule = build("interleaved", pp, microbatches, virtual)
    simulation = simulate(schedule, times(schedule, forward, backward))
    assert simulation.bubble_fraction == pytest.approx((pp - 1) / (virtual * microbatches + pp - 1))


@given(**SHAPES, virtual=st.integers(2, 4))
@examples(25)
def test_interleaved_takes_any_number_of_microbatches(pp: int, microbatches: int, virtual: int) -> None:
    """Never slower than a whole number of groups, nor than 1F1B with stages `virtual` times as long."""
    step = total("interleaved", pp, microbatches, virtual)
    groups = -(-microbatches // pp)
    assert 3 * virtual * microbatches <= step <= 3 * (virtual * groups * pp + pp - 1)
    assert step <= virtual * total("1f1b", pp, microbatches)


@given(**SHAPES)
@examples(20)
def test_bubble_of_zb_h1(pp: int, microbatches: int) -> None:
    """For F = B = W, each rank idles p-1 in a step of 3m: a third of 1F1B's 3(p-1) (arXiv:2401.10241). With
    fewer micro-batches than ranks, the path of the last one there and back and what cannot overlap with it:
    2m + 2p-1."""
    step = total("zb-h1", pp, microbatches)
    assert step == max(3 * microbatches + pp - 1, 2 * microbatches + 2 * pp - 1)
    assert step <= total("1f1b", pp, microbatches)
    if microbatches >= pp:
        assert 3 * (step - 3 * microbatches) == total("1f1b", pp, microbatches) - 3 * microbatches


@given(**SHAPES)
@examples(20)
def test_bubble_of_zb_v(pp: int, microbatches: int) -> None:
    """For F = B = W of stages half as long, each rank idles p-1 of them in a step of 6m: a sixth of 1F1B's
    bubble, and none but what the first micro-batch takes to reach the last rank (arXiv:2405.15362). With few
    micro-batches, 4m + 4p-2."""
    step = total("zb-v", pp, microbatches)
    assert step == max(6 * microbatches + pp - 1, 4 * microbatches + 4 * pp - 2)
    assert step <= 2 * total("zb-h1", pp, microbatches)


def test_times_by_hand() -> None:
    """Two ranks, two micro-batches, 1F1B, a message of 2: rank 1's stage is slower, and its bytes are
    others."""
    schedule = build("1f1b", 2, 2)
    costs = Costs(
        {("F", 0): 3, ("B", 0): 4, ("F", 1): 5, ("B", 1): 7, ("U", 0): 1, ("U", 1): 1},
        transfer=2,
        activations=(100, 10),
    )
    simulation = simulate(schedule, costs)
    first, second = simulation.cells
    assert " ".join(str(cell.action) for cell in second) == "1RA0 1RA1 1F0 1B0 1SG0 1F1 1B1 1SG1 1R 1U"
    assert [cell for cell in first if cell.action.op in "FBU"] == [
        Cell(Action("F", 0, 0), 0, 3),
        Cell(Action("F", 0, 1), 3, 6),
        Cell(Action("B", 0, 0), 19, 23),
        Cell(Action("B", 0, 1), 31, 35),
        Cell(Action("U", 0), 35, 36),
    ]
    assert [cell for cell in second if cell.action.op in "FBU"] == [
        Cell(Action("F", 1, 0), 5, 10),
        Cell(Action("B", 1, 0), 10, 17),
        Cell(Action("F", 1, 1), 17, 22),
        Cell(Action("B", 1, 1), 22, 29),
        Cell(Action("U", 1), 29, 30),
    ]
    passing = {
        str(cell.action): (cell.start, cell.end)
        for cells in simulation.cells
        for cell in cells
        if cell.action.op[0] in "SR"
    }
    assert passing["0SA1"] == passing["1RA1"] == (6, 8)  # behind 1F0
    assert passing["1SG1"] == passing["0RG1"] == (29, 31)
    assert simulation.total == 36
    assert simulation.bubble == (1 - 15 / 36, 1 - 25 / 36)
    assert simulation.bubble_fraction == pytest.approx(1 - 20 / 36)
    assert (simulation.peak, simulation.peak_bytes) == ((2, 1), (200, 10))


def test_the_time_of_a_single_action_comes_before_that_of_its_kind() -> None:
    schedule = build("gpipe", 1, 3)
    costs = Costs({("F", 0): 1, ("B", 0): 2, Action("B", 0, 1): 7, Action("U", 0): 4})
    assert [cell.end - cell.start for cell in simulate(schedule, costs).cells[0]] == [1, 1, 1, 2, 7, 2, 0, 4]


def test_activations_of_split_backward_are_kept_until_the_weight_gradients() -> None:
    simulation = simulate(build("zb-v", 2, 8), Costs({}, activations=(1, 10, 100, 1000)))
    assert simulation.peak == (4, 4)
    # three of stage 0 and one of stage 3; two of each of stages 1 and 2
    assert simulation.peak_bytes == (1003, 220)
    assert (simulation.total, simulation.bubble, simulation.bubble_fraction) == (0, (0, 0), 0)


def receives_at_the_start(schedule: Schedule) -> Schedule:
    return tuple(tuple(sorted(row, key=lambda action: action.op not in ("RA", "RG"))) for row in schedule)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transfer", [0.05, 0.5, 1.0])
def test_transfers_hide_as_well_as_if_every_receive_were_posted_at_the_start(
    name: Name, transfer: float
) -> None:
    for seed, (pp, microbatches) in enumerate([(2, 4), (4, 8), (4, 19), (8, 32)]):
        schedule = build(name, pp, microbatches)
        uneven = random.Random(seed)
        costs = Costs(
            {what: time * uneven.uniform(0.8, 1.2) for what, time in Costs.even(schedule).duration.items()},
            transfer,
        )
        ours, least = (simulate(table, costs).total for table in (schedule, receives_at_the_start(schedule)))
        assert least <= ours <= (1.07 if name == "1f1b-w" else 1.04) * least


@given(
    **SHAPES,
    name=st.sampled_from(NAMES),
    virtual=st.integers(2, 3),
    transfer=st.integers(0, 3),
    seed=st.integers(0, 9),
)
@examples(50)
def test_a_rank_computes_one_thing_at_a_time_and_only_from_what_it_has(
    pp: int, microbatches: int, name: Name, virtual: int, transfer: int, seed: int
) -> None:
    schedule = build(name, pp, microbatches, virtual)
    ranks = stage_ranks(name, pp, virtual)
    uneven = random.Random(seed)
    duration = {what: uneven.randint(1, 5) for what in Costs.even(schedule).duration}
    costs = Costs(duration, transfer)
    simulation = simulate(schedule, costs)
    spans = {cell.action: cell for cells in simulation.cells for cell in cells}
    for rank, cells in enumerate(simulation.cells):
        assert tuple(cell.action for cell in cells) == schedule[rank]
        free = 0.0
        for cell in cells:
            op, stage, _ = cell.action
            if op in ("F", "B", "W"):
                assert cell.start >= free and cell.end - cell.start == costs.of(cell.action)
                free = cell.end
            neighbour = stage + {"F": -1, "B": 1}.get(op, 0)
            if op in ("F", "B") and 0 <= neighbour < len(ranks):
                source = spans[cell.action._replace(stage=neighbour)]
                assert cell.start >= source.end + (transfer if ranks[neighbour] != rank else 0)
    assert simulation.total == max(cell.end for cell in spans.values() if cell.action.op in ("B", "W", "U"))


def test_a_table_that_stops_half_way() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(PolyremeError, match="stops half-way: check"):
        simulate((schedule[0], tuple(action for action in schedule[1] if action.op != "SG")), Costs({}))
