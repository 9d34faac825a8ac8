"""Damage to files, for tests that it is found."""

from __future__ import annotations

import random
from pathlib import Path


def damage(file: Path, rng: random.Random, truncate: bool) -> None:
    """Cut the file off at a random byte, or flip one bit of it."""
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if truncate:
        del data[at:]
    else:
        data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
