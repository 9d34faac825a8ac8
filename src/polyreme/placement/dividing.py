"""How a model is divided before ZeRO divides what each rank has: over pipeline stages and over tensor
parallelism.

Communication: the measured seconds of blocks; numbers of buffers that are new in a changed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from polyreme.config.schema import is_files, tiers_of
from polyreme.deferred_init.replay import Recording
from polyreme.distributed.mesh import Axis, Mesh, SimulatedMesh
from polyreme.errors import ConfigError, ModelError, Problem
from polyreme.layout.bucket_layout import Cut
from polyreme.models import huggingface, peft
from polyreme.pipeline.partition import PipelinePartition, keep_stages, partition_model
from polyreme.pipeline.profile import block_seconds, copy_to
from polyreme.pipeline.rank import PipelineRank
from polyreme.placement.opening import give_shapes, take_from_rank_0
from polyreme.placement.settings import PlacementSettings
from polyreme.tensor import plan as rules
from polyreme.tensor.parallelize import parallelize
from polyreme.zero.changes import Roster


@dataclass(frozen=True)
class Sharding:
    """What this rank has of a parameter: its cut over the ranks of axes `over`, in their order; and the
    pipeline stages that have it."""

    cut: Cut
    stages: tuple[int, ...] = (0,)
    over: tuple[str, ...] = ("tp",)


@dataclass(frozen=True)
class Division:
    """How the model is divided before ZeRO divides what each rank has.

    shardings: every parameter's, by each of its names. dividing: the axes that divide parameters, by what
    `Sharding.over` says. rank_of: of each pipeline stage. ties: the axes over
    ranks whose stages share parameters, by those ranks. computing: the stages whose forward uses a tensor, by
    each of its names."""

    shardings: Mapping[str, Sharding]
    dividing: Mapping[tuple[str, ...], Axis]
    pp: Axis
    rank_of: Sequence[int] = (0,)
    ties: Mapping[tuple[int, ...], Axis] = field(default_factory=dict)
    computing: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def computes(self, name: str) -> bool:
        """Whether a buffer of this rank is the one that counts: its stage's forward changes it, or nothing
        says whose does."""
        stages = self.computing.get(name, ())
        return not stages or self.pp.rank in self.ranks_of(stages)

    @property
    def tp(self) -> Axis:
        """The ranks of tensor parallelism."""
        return self.dividing["tp",]

    def over(self, name: str) -> Axis:
        """The ranks that a parameter is divided over."""
        return self.dividing[self.shardings[name].over]

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        return self.shardings[name].cut.split(whole, self.over(name).rank)

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The ranks of the pipeline that have these stages."""
        return tuple(sorted({self.rank_of[stage] for stage in stages}))


def cut(
    module: nn.Module, recording: Recording | None, stages: int, settings: PlacementSettings, mesh: Mesh
) -> PipelinePartition | None:
    """Which pipeline stage has what, the same on every rank; None for one stage. On a simulated mesh blocks
    are not measured: parameters stand for times."""
    if stages == 1:
        return None
    if peft.learns_prompts(module):
        raise ModelError(
            "PEFT puts learned prompts before this model's inputs, "
            "which a pipeline does not know: set mesh.pp = 1, or use LoRA"
        )
    blocks = settings.blocks
    if not isinstance(blocks, str):
        return partition_model(module, stages, counts=blocks)
    measured = blocks == "time" and not isinstance(mesh, SimulatedMesh)
    costs = _block_seconds(module, recording, settings, mesh) if measured else None
    return partition_model(module, stages, costs=costs, memory=blocks == "parameters")


def _block_seconds(
    module: nn.Module, recording: Recording | None, settings: PlacementSettings, mesh: Mesh
) -> list[float]:
    """Seconds of each block, for one micro-batch: measured by rank 0, on a whole model, for all."""
    dtype = settings.formats.compute
    batch: Any = huggingface.sample_batch(module, *settings.sample)
    if batch is None:
        reason = (
            "to be measured, the model has to be called, but only of "
            "Hugging Face models of texts or images is known with what"
        )
        fix = 'write pipeline.blocks = "work", or how many blocks each stage has'
        raise ConfigError([Problem("pipeline.blocks", "time", reason, fix)])
    found: Any = None
    if mesh.rank == 0:
        try:
            batch = {
                name: value.to(mesh.device, dtype if value.is_floating_point() else None)
                for name, value in batch.items()
            }
            trial = copy_to(mesh.device, dtype, module, recording.replay if recording else None)
            found = block_seconds(trial, batch)
        except Exception as error:  # whatever a forward raises; the other ranks wait to hear of it
            found = f"{type(error).__name__}: {error}"
    found = mesh.gather_objects(found)[0]
    if isinstance(found, str):
        raise ModelError('pipeline.blocks = "time": the blocks could not '
                         f'be measured ({found}); write "work", or how many '
                         "blocks each stage has")  # fmt: skip
    return found


def divide(
    module: nn.Module,
    partition: PipelinePartition | None,
    pipeline: PipelineRank,
    settings: PlacementSettings,
    mesh: Mesh,
) -> Division:
    """Leave of the model this rank's pipeline stages, and of their parameters its part for tensor
    parallelism."""
    cuts = {name: Cut.whole(p.shape, 1) for name, p in module.named_parameters(remove_duplicate=False)}
    dividing: dict[tuple[str, ...], Axis] = {("tp",): mesh.tp}
    if mesh.tp.size > 1:
        sequence = settings.sequence_parallel
        cuts = parallelize(
            module, mesh.tp, rules.plan(module, mesh.tp.size, settings.tp_plan, sequence), sequence
        )
    if partition is None:
        return Division({name: Sharding(each) for name, each in cuts.items()}, dividing, mesh.pp)
    rank_of = pipeline.rank_of
    keep_stages(module, partition, pipeline.mine, mesh.device, settings.formats.compute)
    shardings = {name: Sharding(each, partition.stages_of[name]) for name, each in cuts.items()}
    shared = sorted(
        {tuple(sorted({rank_of[stage] for stage in stages})) for stages in partition.tied.values()}
    )
    ties = {ranks: mesh.among("pp", ranks) for ranks in shared if len(ranks) > 1}
    ties = {ranks: axis for ranks, axis in ties.items() if axis.size > 1}
    return Division(shardings, dividing, mesh.pp, rank_of, ties, partition.stages_of)


def divide_again(
    module: nn.Module, roster: Roster, before: Division, settings: PlacementSettings, mesh: Mesh
) -> Division:
    """How `module`, which was changed since it was divided as `before`, is divided now; its new buffers
    become rank 0's.

    Raises ModelError where buckets cannot be made again. The ranks have changed it in the same way."""
    give_shapes(module, mesh)
    parameters, told = dict(module.named_parameters(remove_duplicate=False)), roster.changes(module)
    reason = ""
    offloaded = [
        key
        for key in ("states", "params", "gradients")
        if is_files(tiers_of(getattr(settings.memory, key))[0])
    ]
    if mesh.pp.size > 1:
        reason = (
            "with mesh.pp each rank has a part of its modules: "
            "save, and initialize a new engine of the changed model"
        )
    elif mesh.tp.size > 1 and not told.only_unfrozen:
        reason = (
            "with mesh.tp its layers are divided already: add "
            "before initialize, or save and initialize a new engine"
        )
    elif offloaded:
        reason = (
            f"memory.{offloaded[0]} is in files: save, and initialize "
            "a new engine of the changed model, or use host memory"
        )
    elif meta := [name for name, p in parameters.items() if p.is_meta and name in told.new]:
        reason = f"{meta[0]} is on the meta device, without numbers: build it on the CPU"
    peft.refuse_bare_base(module)
    if reason:
        what = f"the model ({told})" if str(told) != "nothing" else "the optimizer's groups"
        raise ModelError(f"the engine cannot take in what was changed of {what}: {reason}")
    if mesh.tp.size > 1:
        return before
    for name, buffer in module.named_buffers():
        buffer.data = buffer.data.to(mesh.device).contiguous()
        if name not in roster.buffers:
            take_from_rank_0([buffer], mesh.device, mesh.loss)
    return Division(
        {name: Sharding(Cut.whole(p.shape, 1)) for name, p in parameters.items()}, {("tp",): mesh.tp}, mesh.pp
    )
