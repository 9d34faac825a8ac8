"""Identify this machine, and count how often its kernel kills for lack of memory. Host names do not identify
one: many keep the name that they were installed with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def boot() -> str:
    """Return an identifier of this start of this machine, which all its containers share, whatever their host
    names; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identity() -> str | None:
    """Return an identifier that all processes of this machine or container share, and of no other; None where
    the system has none."""
    try:
        return f"{boot()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def killed_for_memory(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory, in this one's control group, or
    else on the machine; None where neither is counted."""
    for file in _counters(root):
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


def _counters(root: Path) -> Iterator[Path]:
    """Yield the files that may hold the count, the nearest first: of control groups of version 2 and 1, and
    of the kernel. In a container a group's folder may be the root of the mount."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield mounted / path.lstrip("/") / "memory.events"
            yield mounted / "memory.events"
        elif "memory" in controllers.split(","):
            yield mounted / "memory" / path.lstrip("/") / "memory.oom_control"
            yield mounted / "memory" / "memory.oom_control"
    yield root / "proc/vmstat"
