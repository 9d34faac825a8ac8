"""Proposes changes of a config that take less memory.

Invariant: each proposal is valid in the config as it is, and changes something. No communication."""

from __future__ import annotations

from collections.abc import Iterator

from polyreme.config import Config
from polyreme.config.describe import toml

FOLDER = "./offload"
"""The example of a folder on a fast local disk."""
KEYS = "batch.micro, memory.activations, zero.stage, memory.states and memory.params"
"""The keys to name where the config is not known."""


def takes_less(config: Config, world_size: int, host: bool) -> list[str]:
    """List changes of the resolved `config`, one a line, that take less memory: of the host, or else of an
    accelerator."""
    return [
        f"{key} = {toml(value)} (now {toml(config.value(key))})"
        for key, value in changes(config, world_size, host)
    ]


def changes(config: Config, world_size: int, host: bool) -> list[tuple[str, object]]:
    """List the keys and values of `takes_less`."""
    return [
        (key, value)
        for key, value in _changes(config, host)
        if not config._replaced({key: value}).problems(world_size)
    ]


def _changes(config: Config, host: bool) -> Iterator[tuple[str, object]]:
    memory, micro = config.memory, config.batch.micro
    further = {"device": FOLDER if host else "host", "host": FOLDER}
    if isinstance(micro, int) and micro > 1:
        yield "batch.micro", max(n for n in range(1, micro) if micro % n == 0)
    if memory.activations == "keep":
        yield "memory.activations", "recompute"
    elif memory.recompute_every > 1:
        yield "memory.recompute_every", 1
    elif memory.recompute_save:
        yield "memory.recompute_save", ()
    elif memory.activations in ("recompute", "host"):
        yield "memory.activations", "host" if memory.activations == "recompute" and not host else FOLDER
    if config.zero.stage != 3 and config.mesh.dp != 1:
        yield "zero.stage", 3
    for name in ("states", "params"):
        if (home := getattr(memory, name)) in ("device", "host"):
            yield f"memory.{name}", further[home]
