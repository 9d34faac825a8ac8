"""The model that a config describes, without memory, to find out before a run whether and how it can be
divided.

Invariant: a division that `divide` refuses, `initialize` would refuse on every rank.
Communication: none."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from polyreme.config.schema import ContextSection, DataSection, MeshSection, ModelSection, PipelineSection
from polyreme.data import load_tokenizer
from polyreme.layout.mesh_axes import lines
from polyreme.models import huggingface
from polyreme.models.attention import facts_of
from polyreme.pipeline.partition import PipelinePartition, partition_model
from polyreme.pipeline.schedule import Name, stage_ranks
from polyreme.sequence.choice import Choice, choose, neighbours, refuse
from polyreme.tensor import plan as rules


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return make()


def meta_model(section: ModelSection, vocabulary: int | None = None) -> nn.Module:
    """Return the model on the meta device, with `vocabulary` tokens where its own config leaves that open.
    Raises ConfigError."""
    return on_meta(
        partial(huggingface.new_model, section.path, section.config, section.trust_remote_code, vocabulary)
    )


def builder(model: ModelSection, data: DataSection) -> Callable[[], nn.Module] | None:
    """Return a function that builds the model before there is a tokenizer, with as many tokens as it may
    have; None where the config names no model, or a directory that is not on this machine."""
    folders = [each for each in (model.path, data.tokenizer) if each is not None]
    if (model.path is None and model.config is None) or not all(
        Path(each).expanduser().is_dir() for each in folders
    ):
        return None
    vocabulary = None
    if model.path is None:
        vocabulary = data.vocab_size if data.tokenizer is None else len(load_tokenizer(data.tokenizer))
    return partial(huggingface.new_model, model.path, model.config, model.trust_remote_code, vocabulary)


def expected(model: ModelSection, data: DataSection) -> nn.Module | None:
    """Return what `builder` builds, on the meta device."""
    make = builder(model, data)
    return None if make is None else on_meta(make)


def divide(
    model: nn.Module, mesh: MeshSection, pipeline: PipelineSection, schedule: Name
) -> PipelinePartition | None:
    """Assign the blocks of `model` to pipeline stages, as these sections say, without timing them; None for
    one stage.

    Raises ModelError where the mesh cannot divide the model, over tensor-parallel or over pipeline ranks."""
    if mesh.tp > 1:
        rules.plan(model, mesh.tp, mesh.tp_plan, mesh.sequence_parallel)
    if mesh.pp == 1:
        return None
    stages = len(stage_ranks(schedule, mesh.pp, pipeline.virtual))
    counts = None if isinstance(pipeline.blocks, str) else pipeline.blocks
    return partition_model(model, stages, counts=counts, memory=pipeline.blocks == "parameters")


def attention(
    model: nn.Module, mesh: MeshSection, context: ContextSection, per_host: int | None = None
) -> Choice:
    """Return how the attention of `model` is computed over context-parallel ranks, and why. per_host: ranks
    of each host; None: all. Raises ConfigError where its sequences cannot be divided."""
    refuse(model, context, mesh.cp, mesh.tp, own_loss=True)
    sizes: dict[str, int] = {name: getattr(mesh, name) for name in mesh.order}
    ranks = math.prod(sizes.values())
    hosts = [str(rank // (per_host or ranks)) for rank in range(ranks)]
    local = neighbours(hosts, lines(sizes, mesh.order, "cp"))
    return choose(context, facts_of(model), mesh.cp, mesh.tp, local)
