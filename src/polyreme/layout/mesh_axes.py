"""Which ranks form which axis of the mesh. Pure: arithmetic on the axes' sizes and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

AXES = ("pp", "dp", "cp", "ep", "tp")
"""All axes, in the default order: the last is innermost."""


def lines(sizes: Mapping[str, int], order: Sequence[str], name: str) -> list[list[int]]:
    """The lists of global ranks that form axis `name`; the last axis of `order` is innermost (its ranks are
    neighbours)."""
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes.get(axis, 1)
    others = [axis for axis in order if axis != name]
    corners = product(*(range(0, sizes.get(axis, 1) * strides[axis], strides[axis]) for axis in others))
    return [[sum(corner) + i * strides[name] for i in range(sizes.get(name, 1))] for corner in corners]
