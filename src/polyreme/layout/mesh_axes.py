"""The ranks that form each axis of the mesh. Pure: arithmetic on the axes' sizes and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

AXES = ("pp", "dp", "cp", "ep", "tp")
"""All axes, in the default order: the last is innermost."""


ROLES = {"data": ("dp",), "loss": ("dp", "cp")}
"""Axes by role: ranks of `data` have different samples; ranks of `loss` different tokens, over which the loss
is a mean."""


def lines(sizes: Mapping[str, int], order: Sequence[str], *names: str) -> list[list[int]]:
    """Return the groups of global ranks that differ only in their places on axes `names`, each in rising
    order. The last axis of `order` is innermost (its ranks are neighbours)."""
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes.get(axis, 1)

    def corners(axes: Sequence[str]) -> list[int]:
        steps = [range(0, sizes.get(axis, 1) * strides.get(axis, 1), strides.get(axis, 1)) for axis in axes]
        return [sum(corner) for corner in product(*steps)]

    inside = sorted(corners(names))
    return [[corner + each for each in inside] for corner in corners([a for a in order if a not in names])]
