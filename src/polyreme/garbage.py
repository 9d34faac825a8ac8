"""Python's search for garbage in cycles, put off for a while.

It looks at all objects of the process, once enough new ones have outlived a few shorter searches: with torch and transformers that takes a
quarter of a second, in which no thread runs (docs/LOG.md). What makes many objects that go by themselves soon after puts it off. No
communication.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off() -> Iterator[None]:
    """Until the end of the block, in all threads. Where it was off before, it stays off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
