"""The memory of a rank before there is a run: the engine's own layout, over a simulated mesh and fake
tensors.

Invariant: sizes come from the objects that a run has, made by the functions that make them there; no number
of a model is read, and no memory, file or device is taken. Communication: none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyreme.config.schema import OptimizerSection
from polyreme.distributed.mesh import SimulatedMesh
from polyreme.models import huggingface
from polyreme.models.wrappers import unwrap
from polyreme.optim.groups import Recipe, recipe
from polyreme.pipeline.rank import PipelineRank
from polyreme.pipeline.schedule import Name
from polyreme.placement.build import shard_model
from polyreme.placement.dividing import cut, divide
from polyreme.placement.placement import Placement
from polyreme.placement.settings import PlacementSettings
from polyreme.step.memory.kept import ForwardSettings
from polyreme.zero.bucket_memory import resident_bytes
from polyreme.zero.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class Placed:
    """What a rank has of a model, without numbers: its `module`, divided, in the buckets of `placement`, and
    their optimizers, as after a step."""

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    placement: Placement
    sharded_optimizer: ShardedOptimizer

    @property
    def parameters(self) -> int:
        """Distinct parameters of what this rank has of the model, which data-parallel ranks share."""
        return sum(slot.size for bucket in self.placement.buckets for slot in bucket.layout.slots)

    @property
    def memory(self) -> dict[str, int]:
        """The bytes of `Engine.memory` between steps, by category: without activations, and without gradient
        buffers that wait for reuse."""
        parameters, gradients, masters = (
            sum(resident_bytes(bucket)[i] for bucket in self.placement.buckets) for i in range(3)
        )
        buffers = sum(buffer.nbytes for buffer in self.module.buffers())
        states = masters + self.sharded_optimizer.nbytes
        here = {"parameters": parameters, "gradients": gradients, "states": states, "buffers": buffers}
        return here | self.placement.offload.off_device_bytes()


@dataclass(frozen=True)
class RunSettings:
    """The settings that decide the memory of each rank of a run.

    axes, order: of its mesh. schedule, virtual: of its pipeline. micro: samples of a micro-batch. share:
    samples of a rank in a step."""

    axes: Mapping[str, int]
    order: Sequence[str]
    schedule: Name
    virtual: int
    micro: int
    share: int
    optimizer: OptimizerSection
    placement: PlacementSettings
    forward: ForwardSettings

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step on a rank."""
        return self.share // self.micro


def place(model: nn.Module, run: RunSettings, rank: int) -> Placed:
    """Divide `model`, which is on the meta device, in place, as on rank `rank` of a run.

    Raises what `initialize` would, for a model or a config that do not go together."""
    settings = run.placement
    mesh = SimulatedMesh.of(run.axes, run.order, rank, settings.device, False)
    module = unwrap(model)
    made: Recipe = recipe(module, run.optimizer, None)
    pipeline = PipelineRank.of(run.schedule, run.virtual, run.microbatches, mesh.pp)
    blocks: Mapping[str, nn.Module] = huggingface.find_blocks(module)
    partition = cut(module, None, len(pipeline.rank_of), settings, mesh)
    division = divide(module, partition, pipeline, settings, mesh)
    if partition is not None:
        blocks = partition.blocks_of(module, pipeline.mine)
    with FakeTensorMode(allow_non_fake_inputs=True):
        placement = shard_model(module, blocks, made, division, settings, mesh)
        sharded_optimizer = ShardedOptimizer(
            placement.trainable, placement.offload, made.groups, settings.compact
        )
        for optimizer in sharded_optimizer:
            optimizer.state.allocate({slot.name: {"step": 1.0} for slot in optimizer.state.slots()}, {})
    return Placed(module, blocks, placement, sharded_optimizer)
