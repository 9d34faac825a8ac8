"""Which rank this process is, as whoever started it says.

An environment only answers questions (rank, world size, local rank, address): it starts nothing and changes nothing,
after the idea of Lightning Fabric's cluster environments. A new one is a function in `SOURCES`.
Invariant: 0 <= rank < world_size and 0 <= local_rank < local_world_size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polyreme.errors import LaunchError

LAUNCHED = "POLYREME_LAUNCHED"
"""The variable that tells a rank that `polyreme.launch.torchrun` started it, and reports its errors."""


@dataclass(frozen=True)
class Environment:
    """The place of this process in the run; `address` is where ranks meet (host, port), None for a single process."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, index) < getattr(self, size):
                raise LaunchError(
                    f"{self.name} gave {index} = {getattr(self, index)} with {size} = {getattr(self, size)}, "
                    f"but ranks count from 0 to {size} - 1; start every rank with the same {size} and its own {index}"
                )


def detect(variables: Mapping[str, str] = os.environ) -> Environment:
    """The environment that `variables` describe; a run of one process if no launcher left any.

    Raises LaunchError for variables that are incomplete or contradict each other.
    """
    found = (source(variables) for source in SOURCES)
    return next((environment for environment in found if environment), Environment("single process", 0, 1, 0, 1))


def _torchrun(variables: Mapping[str, str]) -> Environment | None:
    """The variables of torchrun, which `polyreme launch` and people who start ranks by hand set, too."""
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None

    def number(name: str, default: int | None = None) -> int:
        text = variables.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            raise LaunchError(
                f"the variable {name} is {text!r}, but with RANK and WORLD_SIZE set it must be a whole number; "
                "start ranks with `polyreme launch` or torchrun, or unset RANK and WORLD_SIZE for a single process"
            ) from None

    rank, world_size = number("RANK"), number("WORLD_SIZE")
    local_world_size = number("LOCAL_WORLD_SIZE", world_size)
    return Environment(
        name="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", rank % max(local_world_size, 1)),
        local_world_size=local_world_size,
        address=(variables.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT")),
    )


SOURCES: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (_torchrun,)
