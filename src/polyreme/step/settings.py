"""What each package needs to know of a run, in its own records: the one place, below the engine, that reads
`Config`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch import nn

from polyreme.config import Config
from polyreme.deferred_init.replay import Recording
from polyreme.distributed.mesh import Mesh
from polyreme.models.buffers import BufferSettings
from polyreme.optim.groups import Recipe
from polyreme.pipeline.rank import PipelineRank
from polyreme.placement.opening import Model, open_model
from polyreme.placement.settings import PlacementSettings
from polyreme.step.accumulation import accumulation_of
from polyreme.step.loss import LossFn, Objective
from polyreme.step.loss_graph import refuse_tables
from polyreme.step.precision import DTYPES, cast_floating, master_dtype, warn_of_default
from polyreme.zero.formats import Formats


def how_to_meet(load: Callable[[], Config]) -> tuple[timedelta, timedelta, str]:
    """How long an operation waits for other ranks, how long they have to meet, and over which backend: as the
    config says, or, of one that cannot be read, as is usual; ranks that met can say so together."""
    try:
        config = load()
    except Exception:  # `same_config` raises it on all ranks
        config = Config()
    mesh, within = config.mesh, timedelta(seconds=config.launch.meet_timeout)
    return timedelta(seconds=mesh.timeout), within, mesh.backend


def opened(given: Model, config: Config, mesh: Mesh) -> tuple[nn.Module, Recording | None, Path | None]:
    """The model that a user gave, as `open_model` says. Raises ModelError for tables that cannot be trained,
    and warns of a format that nobody asked for."""
    found = open_model(given, config.model, config.seed, mesh)
    refuse_tables(found[0], config.accumulation * mesh.world_size)
    if config.origins["precision.compute"] == "default":
        warn_of_default(found[0], config.precision.compute)
    return found


def placement_settings(config: Config, mesh: Mesh) -> PlacementSettings:
    """How a model is placed, for a resolved config."""
    dtype, section = DTYPES[config.precision.compute], config.mesh
    return PlacementSettings(
        mesh.device,
        Formats(dtype, master_dtype(dtype), config.zero.quantized_weights),
        config.zero,
        config.memory,
        accumulation_of(config, mesh, several=config.accumulation > 1),
        None if config.optimizer.states == "fp32" else config.optimizer.states,
        config.pipeline.blocks,
        (int(config.batch.micro), config.data.sequence),
        section.tp_plan,
        section.sequence_parallel,
    )


def pipeline_rank(config: Config, mesh: Mesh) -> PipelineRank:
    """What this rank does in a pipeline."""
    return PipelineRank.of(config.schedule, config.pipeline.virtual, config.accumulation, mesh.pp)


def buffer_settings(config: Config) -> BufferSettings:
    """What becomes of buffers that forwards change."""
    return BufferSettings(config.buffers, config.origins["buffers"] != "default", config.batch_norm)


def objective(
    module: nn.Module, loss_fn: LossFn | None, made: Recipe, config: Config, mesh: Mesh
) -> Objective:
    """What calls the model, and reads its loss as the config weights it."""
    dtype = DTYPES[config.precision.compute]
    # a model of several dtypes converts between them itself
    wanted = dtype if {*made.own_dtypes.values()} <= {dtype} else None
    return Objective(
        module,
        loss_fn,
        partial(cast_floating, dtype=wanted),
        is_split=config.accumulation * mesh.loss.size > 1,
        share=1 / config.accumulation if config.batch.mean == "ranks" else None,
        tells=mesh.has_numbers and mesh.loss.rank == 0 and mesh.tp.rank == 0,
    )
