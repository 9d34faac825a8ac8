"""Trains a few steps of a layout on the ranks that were started, to compare with what a plan says of it.

Invariant: weights are random and nothing is written, but for the file of `main`. All ranks must call.
Communication: the engine's own."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch

from polyreme.config import Config
from polyreme.distributed.environment import detect
from polyreme.errors import ModelError
from polyreme.initialization import initialize
from polyreme.models import huggingface
from polyreme.placement.opening import Model
from polyreme.planner.dry_run import MakeBatch
from polyreme.planner.plan import named_model
from polyreme.step.loss.objective import LossFn

WARM, STEPS = 2, 5
"""Steps that are not timed, as they make optimizer states and fill caches, and those that are."""


def timed_steps(
    model: Model, config: Config, batch: MakeBatch | None = None, loss_fn: LossFn | None = None,
    steps: int = STEPS,
) -> list[float]:  # fmt: skip
    """Return the seconds of each of some steps of a resolved config, on the rank that takes longest. batch:
    as for `plan`. Raises what `initialize` would."""
    with initialize(model, config, loss_fn=loss_fn) as engine:
        make = batch or (
            lambda samples: huggingface.sample_batch(engine.module, samples, config.data.sequence)
        )
        if (share := make(config.share)) is None:
            raise ModelError("it is not known what the model takes: give a function that makes a batch")
        taken = []
        for _ in range(WARM + steps):
            engine.mesh.world.barrier()
            start = time.perf_counter()
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # all ranks have one batch
                engine.train_step(share)
            if engine.mesh.device.type == "cuda":
                torch.cuda.synchronize(engine.mesh.device)
            taken.append(time.perf_counter() - start)
        of_ranks = engine.mesh.gather_objects(taken[WARM:])
    return [max(each) for each in zip(*of_ranks, strict=True)]


def main(file: Path) -> None:
    """Time the config in a JSON file, on all ranks that were started, and write the seconds beside it."""
    config = Config.load(file)
    seconds = timed_steps(named_model(config), config.resolve(detect().world_size))
    if detect().rank == 0:
        file.with_suffix(".times").write_text(json.dumps(seconds), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
