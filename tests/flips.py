"""Runs in which a bit of one rank's copy of a parameter is flipped between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import models
import polyreme
import probe
import training
from polyreme.errors import ModelError


def flipped(
    rank: int,
    world: int,
    case: str,
    settings: Mapping[str, Any],
    name: str,
    bit: int = 0,
    masters: bool = True,
    at: int | None = None,
    folder: Path | None = None,
) -> tuple[int, str]:
    """How many steps it takes until the flip on rank `at` is told of, and the error; 0 where it is not within
    sentinels.every. at: by default the last one; -1: those that are second over tp and have the number.
    folder: flipped after a save and a load by a new engine."""
    engine = made(case, settings)
    for step in range(3):
        engine.train_step(share(engine, case, step))
    if folder is not None:
        engine.save(folder)
        engine = made(case, settings)
        engine.load(folder)
        engine.train_step(share(engine, case, 3))
    if (at == -1 and engine.mesh.tp.rank == 1) or rank == (world - 1 if at is None else at):
        assert probe.flip(engine, name, bit, masters) or at == -1, f"{name} is elsewhere"
    for step in range(engine.config.sentinels.every):
        try:
            engine.train_step(share(engine, case, step))
        except ModelError as error:
            return step + 1, str(error)
    return 0, ""


def made(case: str, settings: Mapping[str, Any]) -> Any:
    return polyreme.initialize(models.build(case, torch.float32), settings, loss_fn=models.CASES[case][2])


def share(engine: Any, case: str, step: int) -> Any:
    batch = models.batch_of(case, training.SAMPLES, step, torch.float32)
    return models.share(batch, engine.mesh.data.rank, engine.mesh.data.size)
