"""Training on a CPU keeps the memory of a step for the next one, or with states or parameters elsewhere gives
it back, unless the user decides."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from polyreme.config.schema import MemorySection
from polyreme.offload.host_allocator import decided

KEPT = """
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
# A small block behind a freed one can make glibc take another place a few times, since it looks for room to
# align it, too.
json.dump(min(faults() for _ in range(12)), sys.stdout)
"""


GIVING = """
import json, re, sys
from pathlib import Path
import torch
import polyreme
from torch import nn


def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10


for memory in json.loads(sys.argv[1]):
    config = {"batch": {"size": 1}, "zero": {"stage": 3}, "memory": memory}
    polyreme.initialize(nn.Linear(4, 4), config, loss_fn=lambda output, batch: output.sum()).close()
# by itself glibc takes blocks up to this size, once it has seen one freed, from its heap
torch.ones(28 << 18)
before = resident()
# small ones hold the heap's end where it is
large, small = zip(*((torch.ones(20 << 18), torch.ones(1 << 18)) for _ in range(10)))
del large
json.dump(resident() - before, sys.stdout)
"""
# Each program in a process of its own, a fork of one that has imported what all need and has asked glibc for
# nothing yet.
EACH = """
import json, os, sys
import torch
import polyreme
import polyreme.engine
sys.stdout.write("[")
for i, (program, argument, variables) in enumerate(json.loads(sys.argv[1])):
    sys.stdout.write("," if i else "")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.environ.update(variables)
        sys.argv[1:] = [argument]
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, (i, argument, variables)
print("]")
"""
DEVICE, HOST = {"states": "device"}, {"states": "host"}
NAME, VERSION = platform.libc_ver()
UNDECIDED = {name: value for name, value in os.environ.items() if not decided({name: value})}


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, str], bool]] = {
    "states on the host": ([HOST], {}, True),
    "states on the device, then on the host": ([DEVICE, HOST], {}, True),
    "states on the device": ([DEVICE], {}, False),
    "the user decides": ([HOST], {"GLIBC_TUNABLES": ""}, False),
}
"""`memory` sections of engines one after the other, variables, and whether freed memory is given back."""


@pytest.fixture(scope="module")
def told() -> list[int]:
    """Page faults of KEPT, then what is left to the process in each of CASES, in MiB."""
    programs = [(KEPT, "", {})]
    programs += [(GIVING, json.dumps(memories), env) for memories, env, _ in CASES.values()]
    command = [sys.executable, "-c", EACH, json.dumps(programs)]
    made = subprocess.run(command, env=UNDECIDED, capture_output=True, text=True, timeout=240, check=False)
    assert not made.returncode, made.stderr
    found = json.loads(made.stdout)
    assert isinstance(found, list)
    return found


@pytest.mark.skipif(
    NAME != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35),
    reason="only a newer glibc can be told for large blocks",
)
def test_freed_memory_is_kept(told: list[int]) -> None:
    assert told[0] < 1000


@pytest.mark.skipif(
    NAME != "glibc" or sys.platform != "linux", reason="glibc alone is told, and /proc is Linux's"
)
@pytest.mark.parametrize("case", CASES)
def test_freed_memory_is_given_back_where_states_are_elsewhere(told: list[int], case: str) -> None:
    """Of 200 MiB in blocks of 20 that are freed, between others that are not."""
    kept = told[1 + list(CASES).index(case)]
    assert kept < 20 if CASES[case][2] else kept > 150


@pytest.mark.parametrize(
    "memory",
    [
        {"states": "host"},
        {"params": "./a"},
        {"states": {"host": 0.5, "device": 0.5}},
        {"activations": "host"},
    ],
)
def test_who_offloads_has_no_memory_to_spare(memory: dict[str, Any]) -> None:
    assert MemorySection().all_on_device and MemorySection(activations="recompute").all_on_device
    assert not MemorySection(**memory).all_on_device


def test_the_environment_decides() -> None:
    assert decided({"MALLOC_ARENA_MAX": "1"}) and decided({"GLIBC_TUNABLES": ""})
    assert not decided({"PATH": "/bin", "OMP_NUM_THREADS": "1"})
