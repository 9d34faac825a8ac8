"""Training on a CPU keeps the memory of a step for the next one, unless states or parameters are somewhere else or the user decides."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from polyreme.allocator import decided
from polyreme.config.keys import MemorySection

PROGRAM = """
import json, resource, sys
import torch
import polyreme
from torch import nn


def faults():  # of 100 MiB that are touched again: by itself glibc maps blocks above 32 MiB anew each time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(100 << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


polyreme.initialize(nn.Linear(4, 4), {"batch": {"size": 1}}, loss_fn=lambda output, batch: output.sum())
torch.set_num_threads(1)
json.dump(min(faults() for _ in range(5)), sys.stdout)
"""


NAME, VERSION = platform.libc_ver()


@pytest.mark.skipif(
    NAME != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35), reason="only a newer glibc can be told for large blocks"
)
def test_freed_memory_is_kept() -> None:
    env = {name: value for name, value in os.environ.items() if not decided({name: value})}
    made = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(made.stdout) < 1000


@pytest.mark.parametrize(
    "memory", [{"states": "host"}, {"params": "./a"}, {"states": {"host": 0.5, "device": 0.5}}, {"activations": "host"}]
)
def test_who_offloads_has_no_memory_to_spare(memory: dict[str, Any]) -> None:
    assert MemorySection().all_on_device and MemorySection(activations="recompute").all_on_device
    assert not MemorySection(**memory).all_on_device


def test_the_environment_decides() -> None:
    assert decided({"MALLOC_ARENA_MAX": "1"}) and decided({"GLIBC_TUNABLES": ""})
    assert not decided({"PATH": "/bin", "OMP_NUM_THREADS": "1"})
