"""Which machine this is. Host names do not tell: many keep the one that they were installed with."""

from __future__ import annotations

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
