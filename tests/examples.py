"""How many examples a property is tried on: some in `make test`, all in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

from cover import ALL as ALL

SOME = 30
whole = pytest.mark.skipif(f"{ALL!r} not in os.environ", reason="seconds of processor time: with --all-cases")
"""Of a test that takes long, where others that are always run have much of what it has. A text, which is
looked at when the test is to run: conftest imports this before it knows the options."""


def always(cases: Iterable[Any], *these: Any) -> list[Any]:
    """The cases of a test, of which `these` are always run and the others with --all-cases."""
    return [each if each in these else pytest.param(each, marks=whole) for each in cases]


def examples(all_of_them: int, **others: Any) -> settings:
    """The decorator of a property, in place of `hypothesis.settings(max_examples=...)`."""
    return settings(max_examples=all_of_them if ALL in os.environ else min(SOME, all_of_them), **others)
