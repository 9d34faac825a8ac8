"""Which cores and which memory a rank of the CPU is to have, as words for numactl."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise

from polyreme.errors import LaunchError
from polyreme.launch.cores import physical_cores


class CoresError(LaunchError, ValueError):
    """Cores that are written in another form, or too few for the ranks."""

    exit_status = 2


def get_numa_cores() -> list[list[int]]:
    """The cores of each NUMA node, as numactl tells; none where it is not installed."""
    try:
        told = subprocess.check_output(["numactl", "--hardware"], text=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[int(core) for core in line.split()] for line in re.findall(r"^node \d+ cpus:(.*)$", told, re.M)]


def parse_range(rng: str) -> range:
    """The numbers of `N` or `N-M`, both included.

    Raises CoresError for any other text."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", rng)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise CoresError(f"Bad range: {rng!r}; write a number, or two with a dash, the smaller one first")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def parse_range_list(range_str: str) -> list[int]:
    """The numbers of `N,N-M,...`.

    Raises CoresError unless they go up."""
    numbers = [number for each in range_str.split(",") for number in parse_range(each)]
    if any(after <= before for before, after in pairwise(numbers)):
        raise CoresError(f"Bad range: {range_str!r}; write each number once, in ascending order")
    return numbers


def get_numactl_cmd(
    bind_core_list: str | None, num_local_procs: int, local_rank: int
) -> tuple[int, list[str]]:
    """How many cores each of `num_local_procs` ranks has, of `bind_core_list` or of all, and the words of
    numactl that keep rank `local_rank` on its own, and on the memory beside them.

    Raises CoresError where there are fewer cores than ranks, and where KMP_AFFINITY is set, which chooses
    cores by itself."""
    if "KMP_AFFINITY" in os.environ:
        raise CoresError("KMP_AFFINITY is set, and binds threads to other cores than numactl; unset it")
    cores = list(range(physical_cores())) if bind_core_list is None else parse_range_list(bind_core_list)
    share = len(cores) // num_local_procs
    if share < 1:
        raise CoresError(f"{num_local_procs} ranks have {len(cores)} cores; each needs one at least")
    own = cores[share * local_rank : share * (local_rank + 1)]
    return share, ["numactl", *_memory(own, get_numa_cores()), "-C", _ranges(own)]


def _memory(cores: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[str]:
    """Words that choose the memory of the node that has all the cores; where each node has another one
    without cores (HBM), that one first; where nodes share their cores, all of those."""
    home = next((node for node, there in enumerate(nodes) if set(cores) <= set(there)), None)
    if home is None:
        return []
    bare = [node for node, there in enumerate(nodes) if not there]
    if bare and 2 * len(bare) == len(nodes):
        with_cores = [node for node, there in enumerate(nodes) if there]
        return ["-p", str(bare[with_cores.index(home)])]
    return ["-m", ",".join(str(node) for node, there in enumerate(nodes) if there == nodes[home])]


def _ranges(cores: Sequence[int]) -> str:
    """As numactl writes cores: 0-3,8."""
    words: list[list[int]] = []
    for core in cores:
        if words and core == words[-1][-1] + 1:
            words[-1].append(core)
        else:
            words.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in words)
