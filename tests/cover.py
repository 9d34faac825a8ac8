"""Few of many cases that have together what all of them have: in place of a full product, a run for every
pair or triple of values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
ALL = "POLYREME_ALL_CASES"
"""The variable that is set where whole products and all examples are to be run."""


def cover(cases: Sequence[T], has: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Cases that have everything which any case has, each chosen as the first that has most of what is still
    missing."""
    left = {i: set(has(case)) for i, case in enumerate(cases)}
    missing = set().union(*left.values())
    found = []
    while missing:
        best = max(left, key=lambda i: len(left[i] & missing))
        missing -= left.pop(best)
        found.append(cases[best])
    return found


def together(values: Mapping[str, Hashable], size: int) -> frozenset[Hashable]:
    """Of named values, every `size` of them."""
    return frozenset(itertools.combinations(sorted(values.items(), key=lambda item: item[0]), size))


def some(size: int, *values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of the product of `values`, enough cases that every `size` of them are in one; with --all-cases all of
    it."""
    product = list(itertools.product(*values))
    if ALL in os.environ:
        return product
    places = list(itertools.product(*(range(len(each)) for each in values)))
    chosen = cover(range(len(places)), lambda i: itertools.combinations(enumerate(places[i]), size))
    return [product[i] for i in sorted(chosen)]
