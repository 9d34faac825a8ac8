"""The smallest change of a config that fits, found where memory has run out.

Invariant: an error of its own is told in its line, and never in place of the shortage. It takes at most
SECONDS and one dry run. No communication: the ranks of a stage have as much, and the first of them looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polyreme.config import Config
from polyreme.config.advice import changes
from polyreme.config.describe import toml
from polyreme.distributed.mesh import Mesh
from polyreme.offload import host
from polyreme.planner.choice import Subject, undisturbed
from polyreme.planner.dry_run import run_kinds
from polyreme.planner.search import binary
from polyreme.step.memory.fit import USED
from polyreme.step.memory.out_of_memory import Advise

SECONDS = 20.0
"""For which a rank looks, and for which others, whose shortage is the same, wait for its report."""


def advice_on(subject: Subject) -> Advise:
    """Return the advice of an engine of this subject."""
    return partial(_advise, subject)


def _advise(subject: Subject, config: Config, mesh: Mesh, own: int, batch: Any) -> str:
    if any(axis.rank for name, axis in mesh.axes.items() if name != "pp"):
        time.sleep(SECONDS)
        return "the first rank of this stage says what would fit"
    try:
        room, until = int(room_of(mesh, own) * USED), time.monotonic() + SECONDS
        with undisturbed():
            return smallest_change(subject, config, room, mesh.device.type, batch, until)
    except Exception as error:  # the shortage is what counts
        said = (str(error).splitlines() or [""])[0]
        return f"what would fit is not known ({type(error).__name__}: {said})"


def room_of(mesh: Mesh, own: int) -> int:
    """Return the bytes of memory that this rank could have for a step: `own` ones, and those that are
    free."""
    if mesh.device.type == "cuda":
        return torch.cuda.mem_get_info(mesh.device)[0] + torch.cuda.memory_reserved(mesh.device)
    return own + (host.available() or host.total()) // mesh.world_size


def smallest_change(
    subject: Subject, config: Config, room: int, device: str, batch: Any, until: float
) -> str:
    """Say what of the resolved `config` is to be changed for a step to fit into `room` bytes. batch: what the
    failed step was given, or None."""
    make = subject.batch if batch is None or isinstance(batch, list) else partial(_like, batch)

    def needs(tried: Config) -> int:
        traces = run_kinds(subject.make, tried, device=device, batch=make, **subject.given).values()
        return max(each.memory.peak + each.memory.host * (device == "cpu") for each in traces)

    now = least = needs(config)
    if now <= room:
        return f"a step takes {binary(now)} of {binary(room)} by a dry run: what ran out is not in it"
    for tried, changed in _tried(config, device == "cpu"):
        if time.monotonic() > until:
            break
        least = min(least, size := needs(tried))
        if size <= room:
            told = ", ".join(f"{key} = {toml(tried.value(key))}" for key in changed)
            was = ", ".join(toml(config.value(key)) for key in changed)
            return f"the smallest change that fits {binary(room)}: {told} (now {was}) takes {binary(size)}"
    return f"a step takes {binary(now)} of {binary(room)}, and with what takes less {binary(least)}"


def _like(batch: Any, samples: int) -> Any:
    """Return a batch of so many samples of the same shapes."""

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros([samples, *tensor.shape[1:]] if tensor.dim() else [], dtype=tensor.dtype)

    return tree_map_only(Tensor, zeros, batch)


def _tried(config: Config, near: bool) -> Iterator[tuple[Config, tuple[str, ...]]]:
    """Yield configs that take less, with the keys that are changed: each change alone, then one after the
    other."""
    ranks = torch.Size(config.axes.values()).numel()
    singles = changes(config, ranks, near)
    for key, value in singles:
        yield _changed(config, ranks, key, value), (key,)
    keys: tuple[str, ...] = ()
    while steps := changes(config, ranks, near):
        key, value = steps[0]
        config, keys = _changed(config, ranks, key, value), tuple(dict.fromkeys((*keys, key)))
        yield config, keys


def _changed(config: Config, ranks: int, key: str, value: object) -> Config:
    values = {"batch.micro": config.batch.micro, key: value}
    return Config.load(config, [f"{name}={toml(each)}" for name, each in values.items()]).resolve(ranks)
