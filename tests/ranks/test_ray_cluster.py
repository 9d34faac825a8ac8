"""`polyreme launch --ray` on a real Ray cluster of one node and of two, where Ray is installed; what is said
where not."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_kubernetes_pods import SCRIPT

from command import polyreme, running, until
from examples import ALL
from hosts import TEMPORARY, Host, hosts, lacking

with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="not installed: pip install 'polyreme[ray]'"
)
whole = pytest.mark.skipif(ALL not in os.environ, reason="half a minute: with --all-cases")
on_hosts = pytest.mark.skipif(bool(lacking()), reason=lacking())
OWN = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # which would kill workers where other tests take the memory
}
HOLD = """
import os, time
from pathlib import Path
print("rank", os.environ["RANK"])
Path("draft" + os.environ["RANK"]).write_text(str(os.getpid()))
Path("draft" + os.environ["RANK"]).rename("begun" + os.environ["RANK"])
time.sleep(1000)
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise ValueError(sys.argv[1])
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of commands on a cluster of two cores."""
    folder = tmp_path_factory.mktemp("ray")
    own = {**OWN, "RAY_TMPDIR": str(folder)}
    words = ["start", "--head", "--block", "--num-cpus", "2", "--include-dashboard=false", "--port", "26379"]
    words += ["--object-store-memory", "80000000", "--node-ip-address", "127.0.0.1"]
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words], env={**os.environ, **own},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    variables = {**own, "RAY_ADDRESS": "127.0.0.1:26379"}
    try:
        yield variables
    finally:
        head.terminate()
        head.wait(60)


def launched(variables: dict[str, str], folder: Path, *words: str) -> tuple[int, str, str]:
    """Of `polyreme launch --ray -n 2 WORDS`, once the cluster is there."""
    deadline = time.monotonic() + 60
    while True:
        ended = polyreme(folder, "launch", "--ray", "-n", "2", *words, variables=variables, warm=False)
        if "finds no cluster" not in ended[2] or time.monotonic() > deadline:
            return ended


@whole
@with_ray
def test_a_script_on_a_cluster_has_the_weights_of_one_host(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    status, _, errors = launched(cluster, tmp_path, "script.py", "weights", "$(HOME) '$$")
    assert status == 0 and ": ranks 0 to 1 (Ray)" in errors, errors
    status, _, errors = polyreme(tmp_path, "launch", "-n", "2", "script.py", "alone", "$(HOME) '$$")
    assert status == 0, errors
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "alone").read_bytes()


@whole
@with_ray
def test_a_rank_that_fails_is_named(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    status, _, errors = launched(cluster, tmp_path, "fail.py", "as it was told")
    assert status == 1 and ": rank 1 of 2 failed first:" in errors and "ValueError: as it was told" in errors


@whole
@with_ray
def test_ctrl_c_ends_the_ranks(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    with running(tmp_path, "launch", "--ray", "-n", "2", "hold.py", variables=cluster, warm=False) as run:
        until(lambda: len(list(tmp_path.glob("begun*"))) == 2 or run.process.poll() is not None, "ranks run")
        assert run.process.poll() is None, run.end()
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        status, printed, errors = run.end()
    assert status == 130 and "error: stopped by SIGINT; every host was told to end" in errors, errors
    assert "rank 0\n" in printed and " 1] rank 1\n" in printed
    ranks = [Path("/proc", each.read_text()) for each in tmp_path.glob("begun*")]
    until(lambda: not any(each.exists() for each in ranks), "no rank is left", 15)
    assert time.monotonic() < began + 15


SAVE = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
print("rank", os.environ["RANK"], flush=True)
while not asked:
    time.sleep(0.05)
open("saved" + os.environ["RANK"], "w")
sys.exit(75)
"""
RANKS = (
    "for each in /proc/[0-9]*; do tr '\\0' ' ' < $each/cmdline; echo; done | grep -c 'launch[.]rank' || true"
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Host]]:
    """Two hosts, which are a cluster of one core each."""
    with hosts(2) as made:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
        words += ["--object-store-memory", "80000000"]
        head, other = made
        for host, more in (
            (head, ["--head", "--include-dashboard=false", "--port", "26379"]),
            (other, ["--address", f"{head.address}:26379"]),
        ):
            own = {**OWN, "RAY_TMPDIR": TEMPORARY}
            host.popen(*words, "--node-ip-address", host.address, *more, variables=own)
        yield made


class Launched:
    """`polyreme launch --ray` over both nodes, begun on the first of them or the second."""

    def __init__(self, host: Host, folder: Path, head: Host, *words: str) -> None:
        self._host, self._pid, self._printed = host, folder / "pid", folder / "printed"
        shell = f'echo $$ > {self._pid}; exec "$@" > {self._printed} 2>&1'
        command = [sys.executable, "-m", "polyreme", "launch", "--ray", "--nodes", "2", "-n", "1", *words]
        own = {**OWN, "RAY_TMPDIR": TEMPORARY, "RAY_ADDRESS": f"{head.address}:26379"}
        self._process = host.popen("sh", "-c", shell, "sh", *command, folder=folder, variables=own)

    @property
    def printed(self) -> str:
        return self._printed.read_text() if self._printed.exists() else ""

    def until(self, *texts: str) -> None:
        until(lambda: all(each in self.printed for each in texts) or self._process.poll() is not None, "")
        assert all(each in self.printed for each in texts), self.printed

    def signal(self, name: str) -> None:
        self._host.run("kill", f"-{name}", self._pid.read_text().strip())

    def end(self, seconds: float = 60) -> int:
        return self._process.wait(seconds)


def launched_on(nodes: list[Host], folder: Path, *words: str) -> Launched:
    """The command, once the cluster is there."""
    deadline = time.monotonic() + 60
    while True:
        run = Launched(nodes[0], folder, nodes[0], *words)
        until(lambda: "\n" in run.printed, "it says something")
        if "finds no cluster" not in run.printed or time.monotonic() > deadline:
            return run


@whole
@with_ray
@on_hosts
def test_two_nodes_have_the_weights_of_one(nodes: list[Host], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = launched_on(nodes, tmp_path, "script.py", "weights", "$(HOME) '$$")
    assert run.end(120) == 0, run.printed
    assert "10.77.0.1: rank 0 (Ray)\n10.77.0.2: rank 1 (Ray)\n2 ranks meet at 10.77.0." in run.printed
    assert "\n[10.77.0.2 1] trained rank 1\n" in run.printed
    status, _, errors = polyreme(tmp_path, "launch", "-n", "2", "script.py", "alone", "$(HOME) '$$")
    assert status == 0, errors
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "alone").read_bytes()


@whole
@with_ray
@on_hosts
@pytest.mark.parametrize(("name", "status"), [("USR1", 75), ("TERM", 75), ("INT", 130), ("KILL", -9)])
def test_signals_over_two_nodes(nodes: list[Host], tmp_path: Path, name: str, status: int) -> None:
    (tmp_path / "save.py").write_text(SAVE)
    run = launched_on(nodes, tmp_path, "--saves", "save.py")
    run.until("rank 0\n", " 1] rank 1\n")
    began = time.monotonic()
    run.signal(name)
    assert run.end() == status, run.printed
    saved = sorted(each.name for each in tmp_path.glob("saved*"))
    assert saved == (["saved0", "saved1"] if status == 75 else []), run.printed
    for host in nodes:
        until(lambda host=host: host.run("sh", "-c", RANKS) == "0\n", "no rank is left", 80)
    assert name == "KILL" or time.monotonic() < began + 15


@whole
@with_ray
@on_hosts
def test_a_rank_of_the_other_node_that_fails_is_named(nodes: list[Host], tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    run = launched_on(nodes, tmp_path, "--saves", "fail.py", "as it was told")
    assert run.end() == 1
    assert "10.77.0.2: rank 1 of 2 failed first:" in run.printed and "as it was told" in run.printed


@whole
@with_ray
@on_hosts
def test_a_node_that_is_cut_off_is_named(nodes: list[Host], tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(SAVE)
    run = launched_on(nodes, tmp_path, "--saves", "save.py")
    run.until("rank 0\n", " 1] rank 1\n")
    nodes[1].link("down")
    try:
        assert run.end() == 1, run.printed
        assert "error: on 10.77.0.2: the connection was lost (Ray ended with status 1: " in run.printed, (
            run.printed
        )
        until(lambda: nodes[0].run("sh", "-c", RANKS) == "0\n", "no rank is left", 15)
        until(lambda: nodes[1].run("sh", "-c", RANKS) == "0\n", "the kernel has ended its rank", 90)
    finally:
        nodes[1].link("up")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    status, _, errors = polyreme(tmp_path, "launch", "--ray", "fail.py")
    assert status == 1 and "pip install ray" in errors
