"""Which of the three ways a bucket sums its gradients in, and what that takes of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyreme.distributed.mesh import Axis
from polyreme.layout.intervals import Interval
from polyreme.offload.gradients import OffloadedGradients
from polyreme.offload.planned import PlannedStore
from polyreme.zero.gradient_sums import Accumulation, GradientSum, ReducedSum, StoredSum, WholeSum
from polyreme.zero.residency import Residency

BF16, FP32 = torch.bfloat16, torch.float32
STORE = OffloadedGradients(PlannedStore(), [Interval(0, 64)], FP32, adds=False)
SEVERAL = Accumulation("whole", FP32, FP32)
ONE, EACH, STORED = (
    Accumulation("whole", BF16, FP32, several=False),
    Accumulation("reduced", BF16, FP32),
    Accumulation("stored", BF16, FP32),
)


def of(accumulation: Accumulation, stage: int = 0, store: OffloadedGradients | None = None) -> GradientSum:
    return accumulation.of(Residency.of_stage(stage), Axis("dp"), store)


@pytest.mark.parametrize(
    ("accumulation", "store", "kind"),
    [
        (ONE, None, WholeSum),
        (ONE, STORE, WholeSum),
        (SEVERAL, None, WholeSum),
        (SEVERAL, STORE, WholeSum),
        (EACH, None, ReducedSum),
        (EACH, STORE, ReducedSum),
        (STORED, STORE, StoredSum),
        (STORED, None, ReducedSum),
    ],
)
def test_each_bucket_has_one_way(
    accumulation: Accumulation, store: OffloadedGradients | None, kind: type[GradientSum]
) -> None:
    sums = of(accumulation, store=store)
    assert type(sums) is kind and sums.store is store
    assert (sums.local, sums.reduce) == (accumulation.local, accumulation.reduce)
    assert sums.reduces_each == (kind is not WholeSum) and sums.several == accumulation.several
    assert sums.leaves == (store is not None and kind is not ReducedSum)


def test_whole_gradients_are_reduced_where_they_are() -> None:
    """Unless they are shards afterwards, or of another format."""
    assert of(SEVERAL).in_place and of(replace(ONE, local=FP32)).in_place
    assert not of(ONE).in_place and not of(SEVERAL, 2).in_place
    assert of(STORED, store=STORE).in_place  # one rank has nothing to sum
    assert not of(EACH).in_place


def test_the_buffer_of_whole_gradients_comes_and_goes_where_it_is_not_needed_between() -> None:
    assert not of(ONE).frees and not of(SEVERAL).frees
    assert of(ONE, 2).comes and of(ONE, store=STORE).comes
    # several are summed in it
    assert of(SEVERAL, 2).frees and not of(SEVERAL, 2).comes
    assert of(EACH).comes and of(STORED, store=STORE).comes
