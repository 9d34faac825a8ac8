"""Choose the number of samples in a micro-batch for the model that a config names, where the config leaves
that open.

Communication: `agreed`; see `step.memory.fit`."""

from __future__ import annotations

import math

from torch import nn

from polyreme.config import Config
from polyreme.distributed.mesh import everyone
from polyreme.planner.meta_model import expected, meta_model
from polyreme.step.memory import fit as step
from polyreme.step.memory.fit import Fit, derived, own_memory
from polyreme.step.memory.kept import device_of_ranks, kept
from polyreme.step.settings import refit, rendezvous_settings, run_settings


def memory_of_ranks(config: Config) -> int:
    """Return the bytes of memory for each rank, where all are on this machine, or on others like it."""
    ranks = math.prod(config.axes.values())
    return own_memory() // (ranks if device_of_ranks().type == "cpu" else 1)


def agreed(config: Config, vocabulary: int) -> tuple[Config, list[str]]:
    """Return the resolved config with micro-batches that fit, and messages about why a step has several. All
    ranks must call."""
    if not config.leaves_micro:
        return config, []
    ranks = everyone(*rendezvous_settings(lambda: config))
    micro, reason = step.agreed(ranks, lambda memory: fit(config, memory, vocabulary))
    fitted = config.fitted(int(config.batch.micro) if micro is None else micro)
    return fitted, [] if micro is None else [derived(int(fitted.batch.micro), reason)]


def fit(config: Config, memory: int, vocabulary: int | None = None) -> Fit:
    """Return how many samples fit into `memory` bytes a rank, under a resolved config."""
    run = run_settings(config)

    def make() -> nn.Module | None:
        return (
            expected(config.model, config.data)
            if vocabulary is None
            else meta_model(config.model, vocabulary)
        )

    return step.fit(run, refit(config), memory, make, lambda model: kept(model, run.forward, run.micro))
