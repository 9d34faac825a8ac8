"""Says what a wrong loss, gradient, norm or update looks like: a factor, a part that is missing or added
twice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyreme.verify.reference import Part

CLOSE = 1e-4
"""The share of a tensor's norm by which a guess may be off."""


def is_close(one: Tensor, other: Tensor, size: Tensor) -> bool:
    """Return whether two tensors are the same beside the size of a third."""
    return float((one - other).double().norm()) <= CLOSE * float(size.double().norm())


def factor(found: Tensor, expected: Tensor) -> float | None:
    """Return the number that `expected` was multiplied by; None if there is none."""
    square = float((expected.double() ** 2).sum())
    ratio = float((found.double() * expected.double()).sum()) / square if square else math.nan
    return ratio if math.isfinite(ratio) and is_close(found, expected * ratio, found) else None


def gradient(
    found: Tensor,
    expected: Tensor,
    each: Sequence[tuple[Part, Tensor]],
    sizes: Mapping[str, int],
    rank: int | None,
) -> str:
    """Say how a gradient differs. each: what every part adds to it. sizes: of the axes. rank: this one's
    place among the data-parallel ranks; None: it is not reduced yet."""

    def of(**wanted: int | None) -> Tensor:
        chosen = [g for part, g in each if all(getattr(part, k) == v for k, v in wanted.items())]
        return sum(chosen, torch.zeros_like(expected))

    if (
        rank is not None
        and len({part.data for part, _ in each}) > 1
        and is_close(found, of(data=rank), expected)
    ):
        return "it has this rank's own samples alone: the sum over the data-parallel ranks (dp) is missing"
    if (ratio := factor(found, expected)) is not None:
        return f"it is {ratio:.6g} times what it is to be{_axis(ratio, sizes)}"
    for data in {part.data for part, _ in each}:
        if is_close(found, expected - of(data=data), expected):
            return f"it lacks all samples of data-parallel rank {data}"
    for micro in {part.micro for part, _ in each}:
        if is_close(found, expected - of(micro=micro), expected):
            return f"it lacks micro-batch {micro + 1} of every rank: an accumulation step is dropped"
    for part, own in each:
        for sign, what in ((-1, "lacks"), (1, "counts twice")):
            if is_close(found, expected + sign * own, expected):
                return f"it {what} micro-batch {part.micro + 1} of data-parallel rank {part.data}"
    return ""


def _axis(ratio: float, sizes: Mapping[str, int]) -> str:
    """Say which axis has the size that a factor is of."""
    for name, size in sizes.items():
        if size > 1 and math.isclose(ratio, 1 / size, rel_tol=1e-3):
            return f": divided by the {size} ranks of {name} once too often, or not summed over them"
        if size > 1 and math.isclose(ratio, size, rel_tol=1e-3):
            return f": summed over the {size} ranks of {name} once too often, or not divided by them"
    return ""


def loss(found: float, expected: float, losses: Sequence[tuple[float, float]]) -> str:
    """Say how a loss differs. losses: the sum and the weight of each part."""
    means = [total / weight for total, weight in losses if weight]
    if means and math.isclose(found, sum(means) / len(means), rel_tol=1e-6):
        return "it is the mean of the micro-batches' means, and not over all labels or samples"
    return f"it is {found:.6g}, and not {expected:.6g}"


def norm(
    found: float,
    expected: float,
    gradients: Mapping[str, Tensor],
    divided: set[str],
    sizes: Mapping[str, int],
) -> str:
    """Say how the norm of all gradients differs. divided: the parameters of which tensor-parallel ranks have
    different parts."""
    both = sum(float(g.double().square().sum()) for name, g in gradients.items() if name not in divided)
    if sizes["tp"] > 1 and math.isclose(found**2, expected**2 + (sizes["tp"] - 1) * both, rel_tol=CLOSE):
        return "parameters that every tensor-parallel rank holds whole are counted once for each (tp)"
    for name, size in sizes.items():
        if size > 1 and math.isclose(found, expected * math.sqrt(size), rel_tol=CLOSE):
            return f"every number is counted as often as {name} has ranks"
    return f"it is {found:.6g}, and not {expected:.6g}"


def update(found: Tensor, expected: Tensor, before: Tensor, lr: float, decay: float) -> str:
    """Say how an updated weight differs. decay: the weight decay of the config."""
    step, wanted, decayed = found - before, expected - before, lr * decay * before
    if is_close(step, torch.zeros_like(step), wanted):
        return "it was not updated"
    for sign, what in (
        (-1, "it has weight decay, which it is not to have"),
        (1, "it lacks its weight decay"),
    ):
        if decay and is_close(found - expected, sign * decayed, decayed):
            return what
    ratio = factor(step, wanted)
    if ratio is None or is_close(step, wanted, wanted):
        return ""
    return f"the step is {ratio:.6g} times as long as it is to be (learning rate, clipping, bias correction)"
