"""The division of a model over pipeline stages and over tensor parallelism, before ZeRO divides what each
rank has.

Communication: the measured seconds of blocks; the numbers of buffers that are new in a changed model."""

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
from polyreme.zero.changes import ModelSnapshot


@dataclass(frozen=True)
class ParameterDivision:
    """What each rank has of a parameter: a slice by its `cut` over the ranks of the axes `over`, in their
    order; and the pipeline `stages` that have it."""

    cut: Cut
    stages: tuple[int, ...] = (0,)
    over: tuple[str, ...] = ("tp",)


@dataclass(frozen=True)
class Division:
    """The division of a model over pipeline stages and tensor parallelism.

    parameters: the division of each parameter, by each of its names. dividing: the axes that divide
    parameters, by `ParameterDivision.over`. rank_of: the pipeline rank of each stage. ties: for parameters
    that stages on several ranks share, the axis over these ranks, by the ranks. computing: the stages whose
    forward uses a tensor, by each of its names."""

    parameters: Mapping[str, ParameterDivision]
    dividing: Mapping[tuple[str, ...], Axis]
    pp: Axis
    rank_of: Sequence[int] = (0,)
    ties: Mapping[tuple[int, ...], Axis] = field(default_factory=dict)
    computing: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def computes(self, name: str) -> bool:
        """Return whether this rank's copy of a buffer is the one that counts: the forward of its stage
        changes the buffer, or no stage is known to."""
        stages = self.computing.get(name, ())
        return not stages or self.pp.rank in self.ranks_of(stages)

    @property
    def tp(self) -> Axis:
        """The tensor-parallel ranks."""
        return self.dividing["tp",]

    def over(self, name: str) -> Axis:
        """Return the ranks that a parameter is divided over."""
        return self.dividing[self.parameters[name].over]

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole parameter."""
        return self.parameters[name].cut.split(whole, self.over(name).rank)

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Return the pipeline ranks that have these stages."""
        return tuple(sorted({self.rank_of[stage] for stage in stages}))


def cut(
    module: nn.Module, recording: Recording | None, stages: int, settings: PlacementSettings, mesh: Mesh
) -> PipelinePartition | None:
    """Assign the model's blocks to pipeline stages, the same on every rank; None for one stage. On a
    simulated mesh blocks are not timed, and their parameter counts are used."""
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
    """Measure on rank 0, with the whole model, how many seconds each block takes for one micro-batch. Returns
    the list on every rank."""
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
        except Exception as error:  # any error of a forward; the other ranks wait for the result
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
    """Keep this rank's pipeline stages of the model, and of their parameters its tensor-parallel slices."""
    cuts = {name: Cut.whole(p.shape, 1) for name, p in module.named_parameters(remove_duplicate=False)}
    dividing: dict[tuple[str, ...], Axis] = {("tp",): mesh.tp}
    if mesh.tp.size > 1:
        sequence = settings.sequence_parallel
        cuts = parallelize(
            module, mesh.tp, rules.plan(module, mesh.tp.size, settings.tp_plan, sequence), sequence
        )
    if partition is None:
        return Division({name: ParameterDivision(each) for name, each in cuts.items()}, dividing, mesh.pp)
    rank_of = pipeline.rank_of
    keep_stages(module, partition, pipeline.mine, mesh.device, settings.formats.compute)
    parameters = {name: ParameterDivision(each, partition.stages_of[name]) for name, each in cuts.items()}
    shared = sorted(
        {tuple(sorted({rank_of[stage] for stage in stages})) for stages in partition.tied.values()}
    )
    ties = {ranks: mesh.among("pp", ranks) for ranks in shared if len(ranks) > 1}
    ties = {ranks: axis for ranks, axis in ties.items() if axis.size > 1}
    return Division(parameters, dividing, mesh.pp, rank_of, ties, partition.stages_of)


def divide_again(
    module: nn.Module, snapshot: ModelSnapshot, before: Division, settings: PlacementSettings, mesh: Mesh
) -> Division:
    """Return the division of `module` after a script changed it; `before` is its old division. New buffers
    take rank 0's numbers.

    All ranks must have changed it in the same way. Raises ModelError where buckets cannot be made again."""
    give_shapes(module, mesh)
    parameters, changes = dict(module.named_parameters(remove_duplicate=False)), snapshot.changes(module)
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
    elif mesh.tp.size > 1 and not changes.only_unfrozen:
        reason = (
            "with mesh.tp its layers are divided already: add "
            "before initialize, or save and initialize a new engine"
        )
    elif offloaded:
        reason = (
            f"memory.{offloaded[0]} is in files: save, and initialize "
            "a new engine of the changed model, or use host memory"
        )
    elif meta := [name for name, p in parameters.items() if p.is_meta and name in changes.new]:
        reason = f"{meta[0]} is on the meta device, without numbers: build it on the CPU"
    peft.refuse_bare_base(module)
    if reason:
        what = f"the model ({changes})" if str(changes) != "nothing" else "the optimizer's groups"
        raise ModelError(f"the engine cannot take in what was changed of {what}: {reason}")
    if mesh.tp.size > 1:
        return before
    for name, buffer in module.named_buffers():
        buffer.data = buffer.data.to(mesh.device).contiguous()
        if name not in snapshot.buffers:
            take_from_rank_0([buffer], mesh.device, mesh.loss)
    return Division(
        {name: ParameterDivision(Cut.whole(p.shape, 1)) for name, p in parameters.items()},
        {("tp",): mesh.tp},
        mesh.pp,
    )
