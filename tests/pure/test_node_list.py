"""Slurm's short forms of node names and of tasks on each node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.distributed.node_list import node_names, tasks_per_node
from polyreme.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("login", ["login"]),
        ("a,b-2,c[1]", ["a", "b-2", "c1"]),
        ("node[8-10]", ["node8", "node9", "node10"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu[1-2]-ib0,gpu3-ib0", ["gpu1-ib0", "gpu2-ib0", "gpu3-ib0"]),
        ("n[1,2-3],m", ["n1", "n2", "n3", "m"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert node_names(text) == names


ranges = st.tuples(st.integers(0, 200), st.integers(0, 30), st.integers(1, 4))
"""First, how many more, digits."""


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list, and its names as counted out one by one."""
    texts, names = [], []
    for prefix in draw(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True), min_size=1)):
        suffix = draw(st.sampled_from(["", "-ib0", ".local"]))
        parts, numbers = [], []
        for first, more, digits in draw(st.lists(ranges, max_size=3)):
            begin = f"{first:0{digits}}"
            end = str(first + more).zfill(len(begin))
            parts.append(begin if not more else f"{begin}-{end}")
            numbers += [str(each).zfill(len(begin)) for each in range(first, first + more + 1)]
        brackets = f"[{','.join(parts)}]" if parts else ""
        texts.append(f"{prefix}{brackets}{suffix}")
        names += [f"{prefix}{number}{suffix}" for number in numbers or [""]]
    return ",".join(texts), names


@examples(200)
@given(node_lists())
def test_a_node_list_names_each_node_in_order(made: tuple[str, list[str]]) -> None:
    text, names = made
    assert node_names(text) == names


@examples(200)
@given(st.text(alphabet="ab[]-,01 (x)", max_size=12))
def test_any_other_text_is_refused_or_is_names(text: str) -> None:
    try:
        names = node_names(text)
    except LaunchError:
        return
    assert names and all(name and not set(name) & set("[], ") for name in names)


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "n[", "n[1", "n[]", "n[2-1]", "n[1-]", "n[a]", "a b"]
)
def test_broken_lists(text: str) -> None:
    with pytest.raises(LaunchError, match="node list"):
        node_names(text)


@pytest.mark.parametrize("text", ["n[0-99999999]", "n[0-999][0-999]", "n[0-99999],m"])
def test_a_list_without_end_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="at most"):
        node_names(text)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_tasks_of_each_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2,", "x", "2(x)", "2(x3", "-1"])
def test_broken_counts(text: str) -> None:
    with pytest.raises(LaunchError, match="tasks on each node"):
        tasks_per_node(text)
