"""The settings of each package for a run, in its own records: the one place below the engine that reads
`Config`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn

from polyreme.config import Config
from polyreme.config.schema import is_files, tiers_of
from polyreme.deferred_init.replay import Recording
from polyreme.distributed.mesh import Mesh
from polyreme.layout.mesh_axes import ROLES
from polyreme.models.buffers import BufferSettings
from polyreme.models.patches import Patches
from polyreme.optim.groups import Recipe
from polyreme.pipeline.rank import PipelineRank
from polyreme.placement.opening import Model, open_model
from polyreme.placement.settings import PlacementSettings
from polyreme.sequence.context import ContextParallel
from polyreme.sequence.loss_chunks import chunk_loss
from polyreme.sequence.mlp_tiles import tile_mlps
from polyreme.step.batch.batches import Batches, Batching
from polyreme.step.loss.graph import refuse_tables
from polyreme.step.loss.objective import LossFn, Objective
from polyreme.step.memory.dry_run import RunSettings
from polyreme.step.memory.fit import FirstBatch
from polyreme.step.memory.kept import ForwardSettings, device_of_ranks
from polyreme.step.precision import DTYPES, cast_floating, master_dtype, warn_of_default
from polyreme.step.training_settings import TrainingSettings
from polyreme.zero.bucket_spec import Formats
from polyreme.zero.gradient_sums import Accumulation


def rendezvous_settings(load: Callable[[], Config]) -> tuple[timedelta, timedelta, str]:
    """Return the timeout of operations between ranks, the time that ranks have to find each other, and the
    backend. A config that cannot be read gives the defaults, so that the ranks can meet and report the error
    together."""
    try:
        config = load()
    except Exception:  # `same_config` raises the error on all ranks
        config = Config()
    mesh, within = config.mesh, timedelta(seconds=config.launch.meet_timeout)
    return timedelta(seconds=mesh.timeout), within, mesh.backend


def opened(given: Model, config: Config, mesh: Mesh) -> tuple[nn.Module, Recording | None, Path | None]:
    """Return the model that a user gave, as `open_model` does. Raises ModelError for embedding tables that
    cannot be trained, and warns of a format that nobody asked for."""
    found = open_model(given, config.model, config.seed, mesh)
    refuse_tables(found[0], config.accumulation * mesh.world_size)
    if config.origins["precision.compute"] == "default":
        warn_of_default(found[0], config.precision.compute)
    return found


def accumulation_of(config: Config, several: bool) -> Accumulation:
    """Return how one micro-batch, or `several`, are summed on the ranks of a resolved config. Where nothing
    is summed, reduced gradients keep the dtype that they come in."""
    compute, reduce = DTYPES[config.precision.compute], DTYPES[config.precision.reduce]
    if not several:
        alone = math.prod(config.axes.values()) == 1
        return Accumulation("whole", compute, compute if alone else reduce, several=False)
    host = tiers_of(config.memory.states)[0] != ["device"]
    # nothing that grows with the model stays on the device then
    offloaded = host and tiers_of(config.memory.params)[0] != ["device"]
    offloaded = offloaded or is_files(tiers_of(config.memory.gradients)[0])
    each = _reduces_each(config)
    if offloaded and (each or _ranks(config) == 1):
        return Accumulation("stored", compute, reduce)
    return Accumulation("reduced", compute, reduce) if each else Accumulation("whole", reduce, reduce)


def _ranks(config: Config) -> int:
    """Return how many ranks share the tokens of a batch."""
    return math.prod(config.axes[name] for name in ROLES["loss"])


def _reduces_each(config: Config) -> bool:
    """Return whether the gradients of each of several micro-batches are reduced."""
    return config.zero.reduce_every == "microbatch" and _ranks(config) > 1


def placement_settings(config: Config, device: torch.device) -> PlacementSettings:
    """Return how a model is placed, for a resolved config."""
    dtype, section = DTYPES[config.precision.compute], config.mesh
    return PlacementSettings(
        device,
        Formats(dtype, master_dtype(dtype), config.zero.quantized_weights),
        config.zero,
        config.memory,
        accumulation_of(config, several=config.accumulation > 1),
        None if config.optimizer.states == "fp32" else config.optimizer.states,
        config.pipeline.blocks,
        (int(config.batch.micro), config.data.sequence),
        section.tp_plan,
        section.sequence_parallel,
    )


def run_settings(config: Config, device: torch.device | None = None) -> RunSettings:
    """Return the settings of a run for a resolved config, on ranks that compute on `device` (default: this
    machine's)."""
    memory = config.memory
    if config.axes["cp"] > 1:  # recomputed blocks keep what their attention had from other ranks
        memory = memory.model_copy(update={"recompute_save": (*memory.recompute_save, "attention")})
    return RunSettings(
        config.axes,
        config.mesh.order,
        config.schedule,
        config.pipeline.virtual,
        int(config.batch.micro),
        config.share,
        config.optimizer,
        placement_settings(config, device or device_of_ranks()),
        ForwardSettings(config.precision.compute, memory, config.data.sequence, config.context),
    )


def refit(config: Config) -> Callable[[int], RunSettings]:
    """Return a function that gives the settings of the run for smaller micro-batches."""
    return lambda micro: run_settings(config.fitted(micro))


def first_batch(module: nn.Module, config: Config) -> FirstBatch | None:
    """Return the search for how many samples fit, where the config leaves that open."""
    return FirstBatch(module, run_settings(config), refit(config)) if config.leaves_micro else None


def sequences_of(
    module: nn.Module, config: Config, mesh: Mesh, own_loss: bool, patches: Patches
) -> ContextParallel | None:
    """Return the division of sequences over mesh.cp, for a whole model; None where the engine has nothing to
    do with its attention. Raises ConfigError with all that stands against it. own_loss: the model returns its
    loss."""
    if not config.computes_attention:
        return None
    split = mesh.tp.size if config.mesh.sequence_parallel else 1
    return ContextParallel(module, config.context, mesh, split, own_loss, patches)


def lighten(
    module: nn.Module, blocks: Mapping[str, nn.Module], config: Config, mesh: Mesh, patches: Patches
) -> None:
    """Compute MLPs and loss of a placed model over as many tokens at a time as the config says. Raises
    ConfigError for a model of which that is impossible."""
    tile, chunk = config.context.mlp_tile, config.context.loss_chunk
    if tile != "none":
        tile_mlps(blocks, tile, patches)
    if chunk != "none" and pipeline_rank(config, mesh).has_loss:
        chunk_loss(module, chunk, patches)


def pipeline_rank(config: Config, mesh: Mesh) -> PipelineRank:
    """Return this rank's place and actions in the pipeline."""
    return PipelineRank.of(config.schedule, config.pipeline.virtual, config.accumulation, mesh.pp)


def training_settings(config: Config, mesh: Mesh) -> TrainingSettings:
    """Return how a model is trained. The config changes too where fewer samples fit than its micro-batch
    has."""

    def refit(micro: int | None) -> Batching:
        config.recut(config.fitted(int(config.batch.micro) if micro is None else micro))
        return _batching(config)

    return TrainingSettings(
        Batches(_batching(config), refit),
        lambda: pipeline_rank(config, mesh),
        accumulation_of(config, several=True),
        _reduces_each(config),
        config.seed,
        config.mesh.order,
        config.compile,
        config.mesh.sequence_parallel,
        config.zero,
        config.optimizer,
        config.lr_schedule,
        config.precision,
        config.checkpoint,
        config.sentinels,
        BufferSettings(config.buffers, config.origins["buffers"] != "default", config.batch_norm),
        lambda: config.model_dump(mode="json"),
    )


def _batching(config: Config) -> Batching:
    batch = config.batch
    return Batching(batch.size, config.data_parallel, int(batch.micro), batch.mean, config.fits)


def objective(
    module: nn.Module, loss_fn: LossFn | None, made: Recipe, config: Config, mesh: Mesh
) -> Objective:
    """Return the objective that calls the model, and reads its loss as the config weights it."""
    dtype = DTYPES[config.precision.compute]
    # a model of several dtypes converts between them itself
    wanted = dtype if {*made.own_dtypes.values()} <= {dtype} else None
    return Objective(
        module,
        loss_fn,
        partial(cast_floating, dtype=wanted),
        is_split=config.accumulation * mesh.loss.size > 1,
        share=1 / config.accumulation if config.batch.mean == "ranks" else None,
        warns=mesh.has_numbers and mesh.loss.rank == 0 and mesh.tp.rank == 0,
    )
