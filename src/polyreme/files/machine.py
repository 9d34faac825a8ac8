"""Which machine this is, and whether its kernel kills for lack of memory. Host names do not tell: many keep
the one that they were installed with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def boot() -> str:
    """Which start of which machine this is: the same in all its containers, whatever their hosts are
    called; "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identity() -> str | None:
    """The same for all processes of this machine, and of no other container or machine; None where the system
    does not tell."""
    try:
        return f"{boot()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def killed_for_memory(root: Path = Path("/")) -> int | None:
    """How many processes of this one's control group the kernel has killed for lack of memory, or of the
    machine where the group does not tell; None where nothing does."""
    for file in _counters(root):
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


def _counters(root: Path) -> Iterator[Path]:
    """The files that may tell, the nearest first: of control groups of version 2 and 1, and of the kernel.
    In a container a group's folder may be the root of what is seen."""
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
