"""Versions of what computes: what is looked at, and what is said where hosts differ."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest

from polyreme.distributed.versions import NONE, _version, refuse_unlike, versions
from polyreme.errors import LaunchError
from polyreme.version import VERSION

LIKE = {"python": "3.11", "torch": "2.13.0"}


def test_what_can_change_numbers() -> None:
    found = versions()
    assert list(found) == ["python", "polyreme", "torch", "transformers", "numba", "numpy"]
    assert found["python"] == "{}.{}".format(*sys.version_info) and found["torch"] == metadata.version(
        "torch"
    )
    assert found["polyreme"].startswith(f"{VERSION} (")


def test_a_package_that_the_path_has_before_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", shadow := ModuleType("numpy"))
    assert _version("numpy") == metadata.version("numpy")
    shadow.__version__ = "1.0"  # type: ignore[attr-defined]
    assert _version("numpy") == "1.0"
    assert _version("none_of_this_name") == NONE


def test_what_differs_is_said_with_the_hosts() -> None:
    refuse_unlike([("a", LIKE), ("a", dict(LIKE)), ("b", LIKE)])
    with pytest.raises(LaunchError) as caught:
        refuse_unlike(
            [("a", LIKE), ("a", LIKE), ("b", {**LIKE, "torch": "2.12.0"}), ("c", {"python": "3.12"})]
        )
    assert str(caught.value) == (
        "ranks have different versions of what can change numbers: python 3.11 on a, b, 3.12 on c; torch "
        "2.13.0 on a, 2.12.0 on b; install the same on each host, or have all ranks use one environment that "
        "each host mounts"
    )
