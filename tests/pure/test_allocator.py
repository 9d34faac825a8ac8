"""Training on a CPU keeps the memory of a step for the next one, unless states or parameters are somewhere else or the user decides."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from polyreme.allocator import decided

PROGRAM = """
import json, resource, sys
import torch
import polyreme
from torch import nn


def faults():  # of 90 MiB that are touched again
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    several = [torch.ones(30 << 18) for _ in range(3)]  # each 30 MiB: glibc gives back what is freed at the end of its heap beyond 64
    del several
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def initialize(**sections):
    return polyreme.initialize(nn.Linear(4, 4), {"batch": {"size": 1}, **sections}, loss_fn=lambda output, batch: output.sum())


torch.set_num_threads(1)
found = {}
for name, sections in {
    "states": {"memory": {"states": "host"}},
    "params": {"memory": {"params": "host"}, "zero": {"stage": 3}},
    "activations": {"memory": {"activations": "host"}},
    "device": {"memory": {"activations": "recompute"}},
}.items():
    engine = initialize(**sections)
    found[name] = min(faults() for _ in range(5))
json.dump(found, sys.stdout)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
def test_freed_memory_is_kept_where_memory_is_to_be_had() -> None:
    env = {name: value for name, value in os.environ.items() if not decided({name: value})}
    made = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, int] = json.loads(made.stdout)
    assert found.pop("device") < 1000
    assert min(found.values()) > 5000, found


def test_the_environment_decides() -> None:
    assert decided({"MALLOC_ARENA_MAX": "1"}) and decided({"GLIBC_TUNABLES": ""})
    assert not decided({"PATH": "/bin", "OMP_NUM_THREADS": "1"})
