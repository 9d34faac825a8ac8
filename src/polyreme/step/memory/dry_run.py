"""What a rank of a run has in memory, before there is a run: the engine's own layout, over a simulated mesh
and fake tensors.

Invariant: sizes come from the objects that a run has, made by the functions that make them there; no number
of a model is read, and no memory, file or device is taken. Communication: none.
"""

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
from polyreme.placement.build import share_out
from polyreme.placement.dividing import cut, divide
from polyreme.placement.placement import Placement
from polyreme.placement.settings import PlacementSettings
from polyreme.step.memory.kept import ForwardSettings
from polyreme.zero.bucket_memory import staying
from polyreme.zero.updates import Updates


@dataclass(frozen=True)
class Placed:
    """What a rank has of a model, without numbers: its `module`, divided, in the buckets of `placement`, and
    their optimizers, as after a step."""

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    placement: Placement
    updates: Updates

    @property
    def parameters(self) -> int:
        """Distinct parameters of this rank's part of the model, which data-parallel ranks share."""
        return sum(slot.size for bucket in self.placement.buckets for slot in bucket.layout.slots)

    @property
    def memory(self) -> dict[str, int]:
        """What `Engine.memory` tells of between steps, by category: without activations, and without
        gradients' buffers that wait for their next use."""
        parameters, gradients, masters = (
            sum(staying(bucket)[i] for bucket in self.placement.buckets) for i in range(3)
        )
        buffers = sum(buffer.nbytes for buffer in self.module.buffers())
        states = masters + self.updates.nbytes
        here = {"parameters": parameters, "gradients": gradients, "states": states, "buffers": buffers}
        return here | self.placement.offload.elsewhere()


@dataclass(frozen=True)
class RunSettings:
    """What decides, before there is a run, what each of its ranks has.

    axes, order: of its mesh. schedule, virtual: of its pipeline. micro: samples of a micro-batch; share: of a
    rank in a step."""

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
    """What rank `rank` of a run would have of `model`, which is on the meta device and is divided in place.

    Raises what `initialize` would, of a model or a config that do not go together."""
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
        placement = share_out(module, blocks, made, division, settings, mesh)
        updates = Updates(placement.trainable, placement.offload, made.groups, settings.compact)
        for update in updates:
            update.state.allocate({slot.name: {"step": 1.0} for slot in update.state.slots()}, {})
    return Placed(module, blocks, placement, updates)
