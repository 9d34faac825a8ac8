"""Which of the host's cores a rank computes on, where several ranks share them.

Invariants: ranks share the cores that this process may use evenly and disjointly, and the hardware threads of
a core, as far as there are enough cores, belong to one rank. No process group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

PIN = "POLYREME_PIN"
"""The variable that has a rank of `polyreme.launch` stay on its share of the cores (1), or not (0)."""


def pin(variables: Mapping[str, str] = os.environ) -> None:
    """Keep this process, and all that it starts, on its share of the cores, where `variables` say so and
    there is one for each rank."""
    if variables.get(PIN, "0") in ("", "0") or not hasattr(os, "sched_setaffinity"):
        return
    if cores := share(
        sorted(os.sched_getaffinity(0), key=_core_key),
        int(variables["LOCAL_RANK"]),
        int(variables["LOCAL_WORLD_SIZE"]),
    ):
        os.sched_setaffinity(0, cores)


def share(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """The rank's part of `cores`: as many as every other has, one after the other; none where there are fewer
    cores than ranks."""
    count = len(cores) // ranks
    return cores[rank * count : (rank + 1) * count]


def _core_key(core: int) -> tuple[int, int, int]:
    """Sorts hardware threads by package and core."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        return (
            int((topology / "physical_package_id").read_text()),
            int((topology / "core_id").read_text()),
            core,
        )
    except (OSError, ValueError):  # not told here
        return 0, core, core


def physical_cores() -> int:
    """How many cores this host has, its hardware threads not counted."""
    return len({_core_key(core)[:2] for core in range(os.cpu_count() or 1)})
