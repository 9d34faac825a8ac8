"""What a run of `polyreme train` does about keys that are "auto": it keeps what the checkpoint has from which
it goes on, or searches.

Communication: `planner.choice.choose`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from polyreme.checkpoint import manifest
from polyreme.config import Config
from polyreme.config.describe import toml
from polyreme.distributed.mesh import everyone
from polyreme.job.resume import find_beginning
from polyreme.planner.choice import Choice, Subject, choose
from polyreme.step.settings import rendezvous_settings

DECIDES = ("model", "mesh", "zero", "memory", "precision", "batch", "pipeline", "optimizer")
"""Sections on which a choice depends, beside `data.sequence`, `compile` and `plan.cluster`."""
ALSO = ("zero.stage", "batch.micro", "pipeline.schedule")
"""Keys that a search chooses, too, where they are "auto"."""
EXPECTED = ("plan.ranks", "plan.seconds", "plan.memory")


def agreed(config: Config, subject: Subject) -> tuple[Config, list[str]]:
    """Return the config, resolved, with what it leaves open, and messages about that. All ranks must call."""
    ranks = everyone(*rendezvous_settings(lambda: config))
    if not config.searched:
        return config.resolve(ranks.size), []
    chosen, said = choose(ranks, config, subject, partial(kept, config, ranks.size))
    return chosen.resolve(ranks.size), [said]


def kept(config: Config, ranks: int) -> Choice | None:
    """Return what the checkpoint, from which the run that `config` describes goes on, has for what is open;
    None where it begins newly, or was of a run on other ranks, or of another config."""
    checkpoints = find_beginning(config).checkpoints
    found = manifest.read(Path(checkpoints[0])) if checkpoints else None
    if found is None:
        return None
    keys = [*config.searched, *(key for key in ALSO if config.value(key) == "auto"), *EXPECTED]
    values = {key: value for key in keys if (value := _value(found.config, key)) is not None}
    chosen = config.chosen(values)
    if chosen.plan.ranks != ranks or chosen.problems(ranks):
        return None
    now = chosen.resolve(ranks).model_dump(mode="json")
    sections = all(now[name] == found.config.get(name) for name in DECIDES)
    others = all(_value(now, key) == _value(found.config, key) for key in _OTHERS)
    if not (sections and others):
        return None
    told = ", ".join(f"{key} = {toml(values[key])}" for key in keys if key in values and key not in EXPECTED)
    return values, f'"auto" ({", ".join(config.searched)}) stays as in {checkpoints[0]}: {told}'


_OTHERS = ("data.sequence", "compile", "plan.cluster")


def _value(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
