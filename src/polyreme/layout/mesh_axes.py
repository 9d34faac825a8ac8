"""Which ranks form which axis of the mesh. Pure: arithmetic on the axes' sizes and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

AXES = ("pp", "dp", "cp", "ep", "tp")
"""All axes, in the default order: the last is innermost."""


ROLES = {"data": ("dp",), "loss": ("dp", "cp")}
"""Axes by what they are for: ranks of `data` have other samples; ranks of `loss` other tokens, over which the
loss is a mean."""


def lines(sizes: Mapping[str, int], order: Sequence[str], *names: str) -> list[list[int]]:
    """The lists of global ranks, ascending, that differ in their places on axes `names` alone. The last axis
    of `order` is innermost (its ranks are neighbours)."""
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes.get(axis, 1)

    def corners(axes: Sequence[str]) -> list[int]:
        steps = [range(0, sizes.get(axis, 1) * strides.get(axis, 1), strides.get(axis, 1)) for axis in axes]
        return [sum(corner) for corner in product(*steps)]

    inside = sorted(corners(names))
    return [[corner + each for each in inside] for corner in corners([a for a in order if a not in names])]
