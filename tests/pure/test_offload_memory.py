"""A process that may not have the memory for a model's states trains it from files, within what
`Engine.working_set` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import whole

PROGRAM = """
import gc, json, os, re, resource, sys
from pathlib import Path
import torch
from torch import nn
import polyreme

WIDTH, BLOCKS = 1024, 16
torch.set_num_threads(1)


def told(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


class Stack(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(output, batch):
    return output.square().mean()


def run(states, limit):
    config = {
        "batch": {"size": 4, "micro": 4},
        "zero": {"stage": 3, "min_bucket": 0},
        "memory": {"states": states, "params": states},
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    # what libraries, threads and compiling take once
    small = polyreme.initialize(lambda: Stack(256), config, loss_fn=loss)
    small.train_step(torch.ones(4, 256))
    small.close()
    del small
    gc.collect()
    base, data = told("VmRSS"), told("VmData")
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
    engine = polyreme.initialize(Stack, config, loss_fn=loss)
    losses = [engine.train_step(torch.ones(4, WIDTH)).loss for _ in range(3)]
    peak, working = told("VmHWM"), engine.working_set()
    found = {"losses": losses, "base": base, "peak": peak, "working": working}
    print(json.dumps({**found, "parameters": engine.parameter_count}))


# each in a process of its own, a fork of one that has imported what all need
for case in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        run(*case)
        sys.stdout.flush()
        os._exit(0)
    sys.exit(1) if os.waitpid(pid, 0)[1] else None
"""


PARAMETERS = 16 * 2 * (1024 + 1) * 1024


def train(*cases: tuple[str, int]) -> subprocess.CompletedProcess[str]:
    """The program's last words on each of `cases` (states, limit), which it ends at the first that fails."""
    # glibc would keep what was freed, and reserve 64 MiB for every thread
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


@whole
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and /proc are Linux's")
def test_what_does_not_fit_trains_from_files(tmp_path: Path) -> None:
    needed = 16 * PARAMETERS  # with gradients and two moments, in float32
    limit = int(0.4 * needed)
    made = train(("device", 0), (str(tmp_path), limit), ("device", limit))
    assert made.returncode and made.stdout.count("\n") == 2 and "memory" in made.stderr.lower(), (
        f"on the device, and only there, the states must not fit: {made.stderr}"
    )
    free, found = (json.loads(line) for line in made.stdout.splitlines())
    assert free["parameters"] == PARAMETERS
    assert found["losses"] == free["losses"]
    expected = found["base"] + sum(found["working"].values())
    assert found["peak"] < 1.1 * expected, (found, expected)
    assert sum(found["working"].values()) < 0.3 * needed
