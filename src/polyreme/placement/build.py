"""Builds what one rank has of a model: its stages and slices, in buckets, with numbers.

Invariant: rank 0's numbers count, whatever the other ranks were given; a model given as a function is never
whole on a rank (except on rank 0 to be measured, for `pipeline.blocks = "time"`).
Communication: broadcasts of the user's model, and that of dividing and of stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from polyreme.deferred_init.replay import Recording
from polyreme.distributed.hybrid import sharing
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import ModelError
from polyreme.optim.groups import Recipe
from polyreme.pipeline.executor import RunStage, Whole
from polyreme.pipeline.rank import PipelineRank
from polyreme.pipeline.stage import Stage, refuse_calls
from polyreme.placement.blocks import released
from polyreme.placement.buckets import bucket_specs
from polyreme.placement.dividing import Division, cut, divide
from polyreme.placement.opening import take_from_rank_0, without_numbers
from polyreme.placement.placement import Placement
from polyreme.placement.settings import PlacementSettings
from polyreme.placement.stores import open_stores
from polyreme.tensor.layers import put_off_weights
from polyreme.zero.bucket import Bucket, BucketMemory
from polyreme.zero.bucket_spec import BucketSpec
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.divided import share_of
from polyreme.zero.gather import Unit
from polyreme.zero.parameter import set_apart, state_of


@dataclass(frozen=True)
class Built:
    """What this rank has of a model. stages: how to run each pipeline stage of this rank. blocks: its
    blocks."""

    placement: Placement
    stages: Mapping[int, RunStage]
    blocks: Mapping[str, nn.Module]


def build(
    module: nn.Module,
    recording: Recording | None,
    recipe: Recipe,
    blocks: Mapping[str, nn.Module],
    pipeline: PipelineRank,
    settings: PlacementSettings,
    mesh: Mesh,
    weights: bool,
) -> Built:
    """Divide the model over pipeline stages, tensor parallelism and data parallelism, in this order.

    blocks: those of the whole model. weights: whether parameters get their numbers here; otherwise they will
    be read from files."""
    partition = cut(module, recording, len(pipeline.rank_of), settings, mesh)
    if partition is not None and recipe.left_out:
        raise ModelError(
            f"the optimizer leaves out {min(recipe.left_out)}, whose gradient nobody takes on a stage of a "
            "pipeline: call requires_grad_(False) on what is not to be trained"
        )
    own_stages_only = (
        recording is None
        and partition is not None
        and any(mesh.gather_objects(bool(without_numbers(module))))
    )
    if recording is None:
        # not over dp, where ZeRO shards parameters
        alike = ("tp",) if own_stages_only else ("tp", "pp")
        take_from_rank_0(_real(module.parameters()), mesh.device, mesh.axis(*alike))
        take_from_rank_0(_real(module.buffers()), mesh.device, mesh.axis("loss", *alike))
    division = divide(module, partition, pipeline, settings, mesh)
    if own_stages_only:
        _take_shared(module, division, mesh)
    if partition is not None:
        blocks = partition.blocks_of(module, pipeline.mine)
    if pipeline.halved:
        put_off_weights(module)
    placement = shard_model(module, blocks, recipe, division, settings, mesh)
    if recording is not None:
        if mesh.has_numbers:
            _make_numbers(module, recording, placement, parameters=weights)
        take_from_rank_0(module.buffers(), mesh.device, mesh.axis("loss", "tp"))
    for buffer in module.buffers():
        buffer.data = buffer.data.to(mesh.device).contiguous()
    if partition is None:
        return Built(placement, {0: Whole()}, blocks)
    stages = {stage: Stage(module, partition, stage) for stage in pipeline.mine}
    refuse_calls(module, partition, stages.values())
    return Built(placement, stages, blocks)


def _real(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not tensor.is_meta]


def _take_shared(module: nn.Module, division: Division, mesh: Mesh) -> None:
    """Set parameters that several stages share to the first stage's numbers, in a model of which each rank
    was given only its own stages' numbers. Raises ModelError where numbers of this rank's stages are
    missing."""
    gathered = mesh.gather_objects([mesh.rank, *without_numbers(module)])
    if lacking := [report for report in gathered if len(report) > 1]:
        rank, name = lacking[0][:2]
        raise ModelError(
            f"{name} is on the meta device on rank {rank}, whose pipeline stage has it: give each rank the "
            "numbers of its stages, or give initialize() the function that builds the model"
        )
    for name, parameter in module.named_parameters():
        if (tie := division.ties.get(division.ranks_of(division.parameters[name].stages))) is not None:
            numbers = parameter.data.to(mesh.device).contiguous()
            tie.broadcast(numbers)
            parameter.data = numbers.to(parameter.device)


def shard_model(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    recipe: Recipe,
    division: Division,
    settings: PlacementSettings,
    mesh: Mesh,
    carried: Collection[int] = (),
) -> Placement:
    """Move every remaining parameter of the model into a bucket, sharded over the data-parallel ranks as the
    ZeRO stage says.

    A parameter with data keeps its values (those of the axis' rank 0). One on the meta device is replaced by
    a real one, to be filled by `Placement.write`; one whose id is in `carried` will be filled, too. All ranks
    must call. Raises as `bucket_specs`, and for stores as `OffloadTiers.commit`."""
    blocks = released(module, blocks, settings.zero.keep)
    axis = sharing(mesh, settings.zero.shard_over, settings.zero.quantized_gradients)
    specs = bucket_specs(module, blocks, recipe, settings, axis, division)
    stores, pool = open_stores(settings, mesh), Pool(axis, mesh.device, mesh.computes_on)
    memory = {spec: stores.memory_of(spec, recipe.groups, pool) for each in specs.values() for spec in each}
    stores.commit()
    own = dict(module.named_parameters(remove_duplicate=False))
    root, *units = (
        Unit(
            names[0] if names else "root",
            [blocks[name] for name in names] or [module],
            [_filled(module, spec, _held(own, spec), memory[spec], carried) for spec in each],
        )
        for names, each in specs.items()
    )
    return Placement(root, units, pool, division, stores)


def _filled(
    model: nn.Module,
    spec: BucketSpec,
    held: Iterable[nn.Parameter],
    memory: BucketMemory,
    carried: Collection[int],
) -> Bucket:
    """Return the bucket of the parameters `held`, with their values, if they have any."""
    device, parameters = memory.pool.device, list[nn.Parameter]()
    values: list[Callable[[], Tensor] | None] = []
    for old, names in zip(held, spec.names, strict=True):
        share = share_of(old)
        if not state_of(old).there:
            set_apart(old)
        old.grad = None  # drop the gradient from before
        if old.is_meta or id(old) in carried:
            values.append(None)
        else:
            values.append(partial(_sent, old.data, spec.axis, device) if share is None else share.taken_whole)
        parameters.append(_real_one(model, old, names, spec, device) if old.is_meta else old)
    bucket = Bucket(spec, parameters, memory)
    for slot, value in zip(spec.layout.slots, values, strict=True):
        if value is not None:
            bucket.write(slot, value())
    bucket.release()
    return bucket


def _held(own: Mapping[str, nn.Parameter], spec: BucketSpec) -> list[nn.Parameter]:
    return [own[slot.name] for slot in spec.layout.slots]


def _real_one(
    model: nn.Module, old: nn.Parameter, names: Iterable[str], spec: BucketSpec, device: torch.device
) -> nn.Parameter:
    """Replace a meta parameter, which cannot be given data of another device, by a real one."""
    made = nn.Parameter(torch.empty(0, device=device, dtype=spec.formats.compute), old.requires_grad)
    made.__dict__.update(old.__dict__)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made)  # recurrent modules follow assignments
    return made


def _sent(numbers: Tensor, axis: Axis, device: torch.device) -> Tensor:
    """Return the numbers of the axis' first rank."""
    found = numbers.to(device).contiguous()
    axis.broadcast(found)
    return found


def _make_numbers(module: nn.Module, recording: Recording, placement: Placement, parameters: bool) -> None:
    """Make the initial values of this rank's parameters (if `parameters`) and buffers."""

    def write(name: str, tensor: Tensor) -> None:
        if name in placement.where:
            placement.write(name, tensor)
            return
        made = tensor.clone()
        for each in (name, *recording.aliases.get(name, ())):
            path, _, attribute = each.rpartition(".")
            module.get_submodule(path)._buffers[attribute] = made

    own = placement.where if parameters else ()
    recording.replay(write, {*own, *(name for name, _ in module.named_buffers(remove_duplicate=False))})
