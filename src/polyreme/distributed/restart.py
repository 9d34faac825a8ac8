"""Tells ranks that torchrun starts again from those before them: its agent's store outlives both, with all
that they wrote.

Invariant: two ranks that agree on a name are both alive; no rank of an earlier start has used it.
Communication: each rank writes a token of its own; rank 0 writes a list of these tokens with a new name, and
again as they change; a rank that finds its own in the list says so under that name; once all have, rank 0
says that it counts."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4


def agree(store: Any, rank: int, world_size: int, record: str, deadline: float) -> str:
    """A name that all ranks of this start know, and none of an earlier one; under it each has written its
    `record`, at NAME/here/RANK. At `deadline` (of the monotonic clock), if not all are here, the name that
    those know who are; empty on other ranks if rank 0 is not."""
    if rank == 0:
        return _call(store, world_size, record, deadline)
    return _answer(store, rank, world_size, record, deadline)


def _call(store: Any, world_size: int, record: str, deadline: float) -> str:
    """Rank 0's part."""
    tokens: dict[str, str] = {}
    name, seen, pause = uuid4().hex, -1, 0.005
    while time.monotonic() < deadline:
        count = store.add(f"tokens/{world_size}", 0)
        if count != seen:
            seen = count
            keys = [str(rank) for rank in range(1, world_size) if store.check([f"token/{rank}"])]
            found = {rank: store.get(f"token/{rank}").decode() for rank in keys}
            if any(found[rank] != token for rank, token in tokens.items()):
                name = uuid4().hex  # one came in the place of an earlier one, who may have said yes
            tokens = found
            store.set(f"{name}/here/0", record)
            store.set("called", json.dumps([name, tokens]))
        if store.add(f"{name}/agreed", 0) == world_size - 1:
            store.set(f"{name}/counts", "")
            break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)
    return name


def _answer(store: Any, rank: int, world_size: int, record: str, deadline: float) -> str:
    token, name, said, pause = uuid4().hex, "", "", 0.005
    store.set(f"token/{rank}", token)
    store.add(f"tokens/{world_size}", 1)
    while time.monotonic() < deadline:
        if store.check(["called"]):
            name, tokens = json.loads(store.get("called"))
            if tokens.get(str(rank)) == token:
                if said != name:
                    store.set(f"{name}/here/{rank}", record)
                    store.add(f"{name}/agreed", 1)
                    said = name
                if store.check([f"{name}/counts"]):
                    break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)
    return said
