"""Tell ranks that torchrun starts again from those before them: the store of its agent outlives both, with
all that they wrote.

Invariant: two ranks that agree on a name are both alive; no rank of an earlier start has used it.
Communication: each rank writes a random token. Rank 0 writes a list of these tokens with a new name, and
again when a token changes. A rank that finds its own token in the list confirms under that name; once all
have, rank 0 marks the name as agreed."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4


def agree(store: Any, rank: int, world_size: int, record: str, deadline: float) -> str:
    """Return a name that all ranks of this start know and none of an earlier one used; under it each has
    written its `record`, at NAME/here/RANK.

    If not all ranks are here at `deadline` (of the monotonic clock), returns the name that the present ones
    know; without rank 0, an empty name."""
    if rank == 0:
        return _call(store, world_size, record, deadline)
    return _answer(store, rank, world_size, record, deadline)


def _call(store: Any, world_size: int, record: str, deadline: float) -> str:
    """Propose names until all other ranks have confirmed one: rank 0's side of `agree`."""
    tokens: dict[str, str] = {}
    name, seen, pause = uuid4().hex, -1, 0.005
    while time.monotonic() < deadline:
        count = store.add(f"tokens/{world_size}", 0)
        if count != seen:
            seen = count
            keys = [str(rank) for rank in range(1, world_size) if store.check([f"token/{rank}"])]
            found = {rank: store.get(f"token/{rank}").decode() for rank in keys}
            if any(found[rank] != token for rank, token in tokens.items()):
                name = uuid4().hex  # a restarted rank replaces an earlier one, which may have agreed
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
