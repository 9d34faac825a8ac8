"""Training on a CPU keeps the memory of a step for the next one, or with states or parameters elsewhere gives
it back, unless the user decides."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.schema import MemorySection
from polyreme.offload.host_allocator import decided
from warm import WarmPython

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


def told(folder: Path, program: str, argument: str = "", variables: Mapping[str, str] | None = None) -> int:
    """What a program says, in a process that has asked glibc for nothing yet."""
    process = WarmPython(["-c", program, argument], folder, {**UNDECIDED, **(variables or {})})
    output, errors = process.communicate(240)
    assert process.returncode == 0, errors
    return int(output)


@pytest.mark.skipif(
    NAME != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35),
    reason="only a newer glibc can be told for large blocks",
)
def test_freed_memory_is_kept(tmp_path: Path) -> None:
    """So that pages are not faulted in again."""
    assert told(tmp_path, KEPT) < 1000


@pytest.mark.skipif(
    NAME != "glibc" or sys.platform != "linux", reason="glibc alone is told, and /proc is Linux's"
)
@pytest.mark.parametrize("case", CASES)
def test_freed_memory_is_given_back_where_states_are_elsewhere(tmp_path: Path, case: str) -> None:
    """Of 200 MiB in blocks of 20 that are freed, between others that are not."""
    memories, variables, given_back = CASES[case]
    kept = told(tmp_path, GIVING, json.dumps(memories), variables)  # MiB
    assert kept < 20 if given_back else kept > 150


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
