"""What `polyreme doctor` says of several hosts, of facts as ranks find them."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme.cli.between_hosts import examine
from polyreme.cli.doctor import Check, show
from polyreme.launch.survey import Pair, Survey, links

FACTS = {
    "versions": {"python": "3.11.7", "polyreme": "0.1.0", "torch": "2.13.0"},
    "interface": "eth0",
    "addresses": [],
    "folder": "/run/here",
    "shared memory": 2**33,
    "files": 65536,
    "gpus": 8,
    "links": {"NV18": 28},
    "sees folder": True,
}
TOPOLOGY = """
	GPU0	GPU1	GPU2	NIC0	CPU Affinity	NUMA Affinity
GPU0	 X 	NV18	SYS	PIX	0-7	0
GPU1	NV18	 X 	SYS	SYS	0-7	0
GPU2	SYS	SYS	 X 	SYS	8-15	1
NIC0	PIX	SYS	SYS	 X
"""


def checks(pairs: list[Pair] | None = None, **second: Any) -> dict[str, Check]:
    """Of hosts a and b, of which b has something of its own."""
    facts = [{"host": "a", **FACTS}, {"host": "b", **FACTS, **second}]
    ways = [Pair(("a", "b"), 2e-5, 1e9, 0.001)] if pairs is None else pairs
    return {check.name: check for check in examine(Survey(16, facts, ways))}


def test_hosts_that_are_alike_are_well() -> None:
    found = checks()
    assert all(check.ok for check in found.values())
    assert found["versions"].found == "python 3.11.7, polyreme 0.1.0, torch 2.13.0 on each"
    assert found["GPUs"].found == "8 (NV18 between 28 pairs) on each"
    assert found["a - b"].found == "20 us, 1.00 GB/s" and found["clocks"].found == "within 1.0 ms of a's"


@pytest.mark.parametrize(
    ("second", "name", "said"),
    [
        ({"versions": {**FACTS["versions"], "torch": "2.12.0"}}, "versions", "b has torch 2.12.0: install"),  # type: ignore[dict-item]
        ({"interface": "lo"}, "interfaces", "on b: this one leads to no other host; unset GLOO"),
        ({"sees folder": False}, "shared folder", "on b: a file that a wrote in its folder is not there"),
        (
            {"versions": {"python": "3.11.7", "torch": "2.13.0"}},
            "versions",
            "b has polyreme not at all: inst",
        ),
        ({"shared memory": 2**26}, "shared memory", "b: 64 MiB free; on b: /dev/shm has too little"),
        ({"files": 256}, "file limit", "on b: too few for connections"),
        ({"gpus": 7}, "GPUs", "on b: a has 8: look at nvidia-smi"),
    ],
)
def test_a_problem_names_its_host_and_its_fix(second: dict[str, Any], name: str, said: str) -> None:
    found = checks(**second)
    assert [each for each, check in found.items() if not check.ok] == [name]
    assert said in found[name].found


def test_a_folder_in_which_nobody_writes() -> None:
    facts = [{"host": each, **FACTS, "sees folder": None} for each in "ab"]
    [bad] = [check for check in examine(Survey(2, facts, [])) if not check.ok]
    assert bad.found.startswith("a cannot write in /run/here: checkpoints need one")


def test_slow_ways_and_clocks_that_differ() -> None:
    pairs = [
        Pair(("a", "b"), 2e-5, 1e8, -3.0),
        Pair(("a", "c"), 2e-5, 1e9, 0.0),
        Pair(("b", "c"), 2e-5, 1e9, 3.0),
    ]
    found = checks(pairs)
    assert [each for each, check in found.items() if not check.ok] == ["clocks", "a - b"]
    assert "b is -3.0 s from a's: start chrony" in found["clocks"].found
    assert "0.10 GB/s, where the fastest has 1.00: look at the cable" in found["a - b"].found


def test_one_slow_host_of_three_is_found() -> None:
    pairs = [Pair((a, b), 2e-5, 1e9 if b == "b" else 1e7, 0.0) for a, b in ("ab", "ac", "bc")]
    found = checks(pairs)
    assert [each for each, check in found.items() if not check.ok] == ["a - c", "b - c"]


def test_links_of_gpus() -> None:
    assert links(TOPOLOGY) == {"NV18": 1, "SYS": 2} and not links("")


def test_a_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for check in checks(**{"sees folder": False}).values():
        show(check, wide=15)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[4].startswith("fail  shared folder  a: /run/here is seen; b:")
