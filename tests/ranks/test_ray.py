"""`polyreme launch --ray` on a real Ray cluster of one node, where Ray is installed; what is said where
not."""

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

with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="not installed: pip install 'polyreme[ray]'"
)
whole = pytest.mark.skipif(ALL not in os.environ, reason="half a minute: with --all-cases")
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
    own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    own["RAY_memory_monitor_refresh_ms"] = "0"  # which would kill workers where other tests take the memory
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


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    status, _, errors = polyreme(tmp_path, "launch", "--ray", "fail.py")
    assert status == 1 and "pip install ray" in errors
