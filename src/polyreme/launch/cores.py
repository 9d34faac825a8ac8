"""Choose the host's cores on which a rank computes, where several ranks share them.

Invariants: ranks share the cores that this process may use evenly and disjointly, and the hardware threads of
a core, as far as there are enough cores, belong to one rank. No process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PIN = "POLYREME_PIN"
"""The variable that pins ranks of `polyreme.launch` to their share of the cores (1), or not (0)."""


def pin() -> None:
    """Pin this process, and all that it starts, to its share of the cores, where PIN asks for it and there is
    a core for each rank."""
    if os.environ.get(PIN, "0") in ("", "0") or not hasattr(os, "sched_setaffinity"):
        return
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if cores := share(sorted(os.sched_getaffinity(0), key=_core_key), rank, ranks):
        os.sched_setaffinity(0, cores)


def share(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Return the rank's share of `cores`: consecutive ones, as many as every other rank has; none where there
    are fewer cores than ranks."""
    count = len(cores) // ranks
    return cores[rank * count : (rank + 1) * count]


def _core_key(core: int) -> tuple[int, int, int]:
    """Return a key that sorts hardware threads by package and core."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        return (
            int((topology / "physical_package_id").read_text()),
            int((topology / "core_id").read_text()),
            core,
        )
    except (OSError, ValueError):  # the system does not say
        return 0, core, core


def physical_cores() -> int:
    """Return how many cores this host has, without counting hardware threads."""
    return len({_core_key(core)[:2] for core in range(os.cpu_count() or 1)})
