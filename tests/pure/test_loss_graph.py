"""What autograd's record of a loss tells of what it is the mean of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme.errors import BatchError
from polyreme.step.loss.graph import describe_terms, has_cross_entropy, refuse_scaled, weight_of

LOGITS = torch.randn(6, 4, requires_grad=True)
LABELS = torch.tensor([0, 1, -100, 3, 2, -100])
NUMBERS = torch.rand(6, 4)


def entropy(**options: float) -> Tensor:
    return F.cross_entropy(LOGITS, LABELS, **options)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (lambda: entropy(), 4),
        (lambda: 0.3 * entropy(), 4),
        (lambda: -entropy() / 2, 4),
        (lambda: entropy(label_smoothing=0.1), 4),
        (lambda: entropy() + 2 * entropy(), 4),
        (lambda: entropy().double().squeeze(), 4),
        (lambda: entropy() + F.mse_loss(LOGITS, NUMBERS), None),  # means over 4 and over 24
        (lambda: F.mse_loss(LOGITS, NUMBERS), None),
        (lambda: LOGITS.square().mean(), None),
        (lambda: LOGITS.square().sum(), None),
        (lambda: entropy() + LOGITS.square().sum(), None),
    ],
)
def test_cross_entropy_tells_its_weight(loss: object, weight: float | None) -> None:
    assert callable(loss)
    assert weight_of(loss()) == weight


@pytest.mark.parametrize(
    ("loss", "weight", "seen"),
    [
        (lambda: entropy(), 4, None),
        (lambda: F.mse_loss(LOGITS, NUMBERS), 6, None),
        (lambda: LOGITS.square().mean(), 6, None),
        (lambda: LOGITS.square().sum() / 6, 6, None),
        (lambda: entropy(), 6, "NllLoss (a mean over 4)"),
        (lambda: entropy() + LOGITS.square().sum(), 4, "Sum (no mean)"),
        (lambda: F.mse_loss(LOGITS, NUMBERS, reduction="sum"), 6, "no mean"),
    ],
)
def test_what_is_no_mean_over_the_weight_is_named(loss: object, weight: float, seen: str | None) -> None:
    assert callable(loss)
    found = describe_terms(loss(), weight)
    assert found is None if seen is None else found is not None and seen in found


def test_cross_entropy_is_found_among_others() -> None:
    assert has_cross_entropy(entropy() + LOGITS.square().sum()) and not has_cross_entropy(
        LOGITS.square().mean()
    )


def test_a_loss_whose_name_begins_as_a_product_is_none() -> None:
    """torch's margin losses are MultiMarginLoss and MultilabelMarginLoss in its graph."""
    for loss_of, labels in (
        (F.multi_margin_loss, torch.tensor([0, 1, 2, 3, 2, 0])),
        (F.multilabel_margin_loss, torch.tensor([[1, -1, -1, -1]] * 6)),
    ):
        loss = loss_of(LOGITS, labels)
        refuse_scaled(loss, None, 4, 6)
        with pytest.raises(BatchError, match="divided by 4"):
            refuse_scaled(loss / 4, None, 4, 6)
