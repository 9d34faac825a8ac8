"""`polyreme verify CONFIG`: the model and the data that a config names, verified on the ranks at hand, or on
ranks that it starts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from polyreme.config import Config
from polyreme.data import Loader, open_text
from polyreme.distributed.mesh import everyone
from polyreme.distributed.process_group import close, world
from polyreme.engine import Engine
from polyreme.job import run as job
from polyreme.job.fit import memory_of_ranks
from polyreme.launch.torchrun import launch, options_here
from polyreme.models import huggingface
from polyreme.models.smaller import shrunk
from polyreme.pipeline.schedule import stage_ranks
from polyreme.planner.meta_model import meta_model
from polyreme.step.settings import rendezvous_settings
from polyreme.verify import Verdict
from polyreme.verify.run import Mode, verified

BYTES = 72
"""Bytes that verifying takes for each parameter on each rank, without activations: the whole reference in
float64 with gradients, moments and the sums of one rank, and the engine's."""


def start(command: Sequence[str], ranks: int) -> Verdict:
    """Run the command on `ranks` ranks of this host, and return the verdict that they write."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.json"
        launch(["-m", "polyreme", *command, "--result", str(file)], ranks, options=options_here())
        return Verdict.of_dict(json.loads(file.read_text("utf-8")))


def show(verdict: Verdict, as_json: bool, result: Path | None) -> None:
    """Print a verdict, or write it to a file."""
    if result is not None:
        result.write_text(json.dumps(verdict.to_dict()), "utf-8")
    else:
        typer.echo(json.dumps(verdict.to_dict(), indent=2) if as_json else str(verdict))


def run(config: Config, steps: int, mode: Mode, shrink: bool | None) -> Verdict:
    """Verify what `config` describes, on the ranks that there are; every rank calls this. shrink: verify a
    smaller model; None: where the whole one does not fit."""
    world_size, rank = world()
    resolved = config.resolve(world_size)
    job.check_sources(resolved)
    huggingface.quiet(rank)
    job.check_model(resolved)
    job.check_division(resolved)
    text = open_text(config.data, config.seed, config.model.path)
    vocabulary = len(text.tokenizer)
    job.check_model(resolved, vocabulary)
    job.check_lengths(resolved, text, resolved.data_parallel)
    config, notes = _fitting(config, resolved, vocabulary, shrink)

    def give(engine: Engine) -> Any:
        batches = iter(engine.loader(text.train, workers=0))
        return lambda _: next(batches)

    whole = iter(
        Loader(
            text.train, batch_size=resolved.batch.size, rank=0, world=1,
            seed=config.seed, shuffle=config.data.shuffle, workers=0,
        )
    )  # fmt: skip
    model = job.model_of(config, vocabulary)
    try:
        found = verified(model, config, give, lambda _: next(whole), steps=steps, mode=mode)
        return replace(found, notes=[*notes, *found.notes])
    finally:
        close()


def _fitting(
    config: Config, resolved: Config, vocabulary: int, shrink: bool | None
) -> tuple[Config, list[str]]:
    """Return the config of a model that can be verified in the memory that there is, and what was changed.
    All ranks must call."""
    section, whole = config.model, meta_model(config.model, vocabulary)
    needs = BYTES * sum(parameter.numel() for parameter in whole.parameters())
    if shrink is None:
        ranks = everyone(*rendezvous_settings(lambda: config))
        has = min(ranks.gather_objects(memory_of_ranks(resolved)))
        shrink = needs > has
    if not shrink:
        return config, []
    stages = len(stage_ranks(config.schedule, config.mesh.pp, config.pipeline.virtual))
    path, trust = section.path, section.trust_remote_code
    smaller, what = shrunk(path, section.config, trust, config.mesh.tp * config.mesh.cp, stages)
    tree = config.model_dump(exclude_unset=True)
    tree["model"] = {"config": {**smaller, "vocab_size": max(smaller.get("vocab_size") or 0, vocabulary)}}
    if not isinstance(config.pipeline.blocks, str):
        tree["pipeline"].pop("blocks")
    found = Config.load(tree)
    job.check_model(found.resolve(world()[0]), vocabulary)
    room = f"the whole one takes {needs / 2**30:.3g} GiB a rank to verify"
    return found, [f"a smaller model with new weights was verified ({what}); {room}"]
