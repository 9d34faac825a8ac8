"""The machine that a choice is made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyreme.config import Config
from polyreme.errors import ConfigError
from polyreme.planner import choice
from polyreme.planner.choice import cluster_of
from polyreme.planner.hardware import Cluster
from polyreme.planner.plan import limits_of

RANKS = [["a", 64 << 30, 100 << 30], ["a", 64 << 30, 100 << 30], ["b", 60 << 30, 90 << 30]]


def test_cpu_ranks_share_the_memory_of_their_host() -> None:
    found = cluster_of(Config.load({"memory": {"states": "auto"}}), RANKS)
    assert (found.device.memory, found.ranks_per_host) == (32 << 30, 2)
    # nothing is gained by another place in the same memory
    assert limits_of(found, Config()).host == 0 < limits_of(Cluster.load("h100"), Config()).host


def test_a_gpu_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_of_ranks", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = cluster_of(Config(), RANKS)
    assert found.device.name == "NVIDIA H100" and found.device.units > 1
    assert (found.device.memory, found.host.memory, found.ranks_per_host) == (60 << 30, 90 << 30, 2)


def test_a_description_counts_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('base = "cpu"\nname = "mine"\n[device]\nmemory = "3 GiB"\n')
    config = Config.load({"plan": {"cluster": str(tmp_path / "cluster.toml")}})
    found = cluster_of(config, RANKS)
    assert (found.name, found.device.memory, found.ranks_per_host) == ("mine", 3 << 30, 2)
    with pytest.raises(ConfigError, match="no preset of this name"):
        cluster_of(Config.load({"plan": {"cluster": "nope"}}), RANKS)
