"""Ranks on hosts of their own (hosts.py): they meet, and train to the bits of one host's run."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch_unlike_hosts import bound

from command import SOURCE, until
from examples import ALL
from host_training import DIFFERENT, by_hand, trained, write
from hosts import Host, hosts, lacking

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_two_hosts_train_to_the_bits_of_one(two: list[Host], script: Path) -> None:
    first, second = two
    alike = trained(script, [first, first], "127.0.0.1")
    assert [words[-1] for words in alike] == ["lo", "lo"]
    # as Debian's hosts file has it, which gloo would listen at
    first.set_own_address("127.0.1.1")
    second.set_own_address("127.0.1.1")
    try:
        apart = trained(script, [first, second], "n1")
    finally:
        for host in two:
            host.set_own_address(host.address)
    assert [words[-1] for words in apart] == ["eth0", "eth0"]
    assert {words[-2] for words in apart} == {words[-2] for words in alike}


def test_hosts_with_different_sources_of_polyreme_do_not_train(
    two: list[Host], script: Path, tmp_path: Path
) -> None:
    version = Path(SOURCE) / "polyreme" / "version.py"
    (tmp_path / "version.py").write_text(f"{version.read_text()}\n")
    with bound(two[1], tmp_path / "version.py", version):
        runs = [
            host.script(script, "3", "60", variables=by_hand(rank, 2, "n1")) for rank, host in enumerate(two)
        ]
        ends = [run.end() for run in runs]
    for status, printed in ends:
        assert status and re.search(
            DIFFERENT + r"polyreme \S+ \(\w{8}\) on n1, \S+ \(\w{8}\) on n2; ", printed
        )


LOOP = """
import pathlib, sys
import torch
import polyreme
torch.set_num_threads(1)
config = {"batch": {"size": 4}, "zero": {"stage": 3}, "mesh": {"timeout": 6}}
engine = polyreme.initialize(torch.nn.Linear(8, 64), config, loss_fn=torch.nn.functional.cross_entropy)
dp = engine.mesh.dp
while True:
    engine.train_step((torch.randn(4 // dp.size, 8), torch.randint(4, (4 // dp.size,))))
    pathlib.Path(__file__).with_name(f"begun{dp.rank}").touch()
"""


@pytest.mark.skipif(ALL not in os.environ, reason="mesh.timeout runs out, twice: with --all-cases")
@pytest.mark.parametrize("how", ["stopped", "cut off"])
def test_no_rank_waits_for_ever_for_a_host_that_stops(two: list[Host], tmp_path: Path, how: str) -> None:
    first, second = two
    (tmp_path / "loop.py").write_text(LOOP)
    runs = [
        host.popen(
            sys.executable,
            "loop.py",
            folder=tmp_path,
            variables=by_hand(rank, 4, first.address, (rank % 2, 2)),
        )
        for rank, host in enumerate([first, first, second, second])
    ]
    until(lambda: len(list(tmp_path.glob("begun*"))) == 4, "all ranks train")
    try:
        if how == "cut off":
            second.link("down")
        else:
            for run in runs[2:]:
                os.kill(run.pid, signal.SIGSTOP)  # nsenter
                [rank] = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
                os.kill(int(rank), signal.SIGSTOP)
        for run in runs[: 4 if how == "cut off" else 2]:
            said, _ = run.communicate(timeout=40)
            missing = "ranks 2, 3 on n2 did not come" if run in runs[:2] else "the host of rank 0"
            assert run.returncode == 1 and f"failed, because {missing}" in said, said
    finally:
        second.link("up")
        for run in runs:
            run.kill()


def test_a_host_that_is_cut_off_is_named(two: list[Host], script: Path) -> None:
    first, second = two
    second.link("down")
    try:
        runs = [
            host.script(script, "0", "2", variables=by_hand(rank, 2, first.address))
            for rank, host in enumerate(two)
        ]
        (status, said), (other, alone) = (run.end() for run in runs)
    finally:
        second.link("up")
    assert status == other == 1
    assert "rank 1 of 2 did not come to the meeting at 10.77.0.1" in said and "on n1 rank 0" in said
    assert "rank 1 (on n2) could not reach the meeting" in alone


@pytest.mark.parametrize(("name", "why"), [("lo", "leads to no other host"), ("ib7", "no such interface")])
def test_an_interface_that_leads_nowhere_is_refused(
    two: list[Host], script: Path, name: str, why: str
) -> None:
    first, _ = two
    runs = [
        host.script(
            script, "0", "60", variables={**by_hand(rank, 2, first.address), "GLOO_SOCKET_IFNAME": name}
        )
        for rank, host in enumerate(two)
    ]
    for status, said in (run.end() for run in runs):
        assert status == 1 and f"GLOO_SOCKET_IFNAME is {name}" in said and why in said
        assert "eth0 leads to the meeting at 10.77.0.1" in said
