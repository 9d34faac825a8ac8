"""The mechanisms that train a model as it is placed in buckets: made at first, and anew of a model that was
changed.

Communication: none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polyreme.config import Config
from polyreme.distributed.agreement import same_model
from polyreme.distributed.mesh import Mesh
from polyreme.errors import BatchError
from polyreme.models.buffers import Buffers
from polyreme.optim.groups import Recipe, recipe, refuse_foreign
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.optim.options import Options
from polyreme.pipeline.rank import PipelineRank
from polyreme.step import given_gradients, grad_scaler, other_optimizers
from polyreme.step.accumulation import each_time
from polyreme.step.engine_state import EngineContents
from polyreme.step.loss import Objective
from polyreme.step.optimizer_view import OptimizerView, Source
from polyreme.step.precision import loss_scale
from polyreme.step.progress import TrainingProgress
from polyreme.step.replicas import Replicas
from polyreme.step.step import Step
from polyreme.step.totals import StepSums
from polyreme.step.user_loop import Loop
from polyreme.tensor.gradient_states import GradientStates
from polyreme.tensor.states import PART, WHOLE
from polyreme.zero.changes import Roster
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import disown
from polyreme.zero.partition import Placement
from polyreme.zero.reduce import Reducer
from polyreme.zero.refresh import carry
from polyreme.zero.sleep import Sleep
from polyreme.zero.updates import Updates


class Training:
    """Gathers, reduces and updates the buckets of `placement`.

    `roster` knows what the model had when this was made, `loop` what the user's own loop called, and
    `contents` all that a checkpoint has."""

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        mesh: Mesh,
        placement: Placement,
        pipeline: PipelineRank,
        objective: Objective,
        alike: Collection[Tensor],
        optimizer: tuple[Recipe, Any, Any],
    ) -> None:
        """`alike`: buffers that ranks compute alike. `optimizer`: its recipe, what the user gave for it, and
        the torch scheduler that it follows, or None."""
        made, given, scheduler = optimizer
        cuts, self.placement = placement.division.shardings, placement
        sharded = {slot.name for each in placement.buckets if each.sharded for slot in each.layout.slots}
        divided = {name for name in cuts if not cuts[name].cut.is_whole}
        self.buffers = Buffers(module, mesh, config, alike, sharded, divided)
        self._config, self._mesh, self._given = config, mesh, given
        every_time = each_time(config, mesh.loss.size, placement.microbatches)
        self._reducer = Reducer(
            placement.trainable,
            config.accumulation,
            every_time,
            pipeline.mine,
            gathers=any(bucket.sharded for bucket in placement.buckets),
        )
        zero, complete = config.zero, self._reducer.complete
        self.blocks = Blocks(module, placement.root, placement.units, zero.prefetch, zero.release, complete)
        states = config.optimizer.states
        self.updates = Updates(placement, made.groups, None if states == "fp32" else states)
        led = given if isinstance(given, Optimizer) else None
        self.options = Options(made, LRSchedule(config.lr_schedule), scheduler, led)
        tells, over_ranks = mesh.tp.alone() * pipeline.counts(mesh.pp), config.batch.mean == "ranks"
        copied = mesh.axis("tp", "pp").size > 1
        sums = StepSums(mesh, tells, self.options, over_ranks, Replicas(placement, mesh) if copied else None)
        progress = TrainingProgress(self.options, loss_scale(config.precision))
        self.step = Step(
            config, sums, placement, self._reducer, self.blocks, self.updates, progress, self.buffers
        )
        self.step.clips_unasked = given is not None and "clip" not in config.optimizer.model_fields_set
        self.options.on_metric(self.step.plateau)
        self.step.states = self._states(config, mesh)
        self.contents = EngineContents(module, config, mesh, placement, list(self.updates), self.step)
        trained = [parameter for bucket in placement.trainable for parameter in bucket.parameters]
        self.loop = Loop(module, objective, config, self.step, self._reducer, trained)
        self.sleep = Sleep(placement.buckets, self.updates)
        self.roster = Roster(module)
        self.source = Source(self.options, self.updates)
        self._view: OptimizerView | None = None
        self._refusals = []
        if led is not None:
            self._refusals += other_optimizers.refuse_calls(led)
            grad_scaler.refuse_for(led)

    def _states(self, config: Config, mesh: Mesh) -> GradientStates | None:
        """What follows gradients over tensor parallelism."""
        if mesh.tp.size == 1:
            return None
        shardings = self.placement.division.shardings
        parameters = {
            parameter: (slot.name, shardings[slot.name].cut)
            for bucket in self.placement.buckets
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        }
        between = PART if config.mesh.sequence_parallel else WHOLE
        states = GradientStates(mesh.tp, parameters, between if mesh.pp.size > 1 else None)
        self._reducer.summed = states.summed
        return states

    def optimizer(self, engine: Any) -> OptimizerView:
        """The optimizer of all shards, as a user of `engine` sees it."""
        if self._view is None:
            self._view = OptimizerView(engine, self.source)
        return self._view

    def look(self, model: nn.Module, refresh: Callable[[], None]) -> None:
        """Before a step or what else depends on the model: `refresh` where a script has changed the groups of
        its own optimizer. Raises BatchError for that in the middle of a step, and ModelError for changes of
        the model."""
        if not self.options.regrouped(thorough=self.step.state.step % LOOK_EVERY == 0):
            self.roster.check(model)
        elif self.step.begun:
            raise BatchError(_REGROUPED)
        else:
            refresh()

    def recipe_of(self, module: nn.Module) -> Recipe:
        """The recipe of the model as it is now, the same on all ranks, which must call. Raises ModelError
        where this cannot go on by it."""
        made = recipe(module, self._config.optimizer, self._given)
        refuse_foreign(module, self._given, self.options.parameters)
        given_gradients.refuse_older(module, made, self.placement)
        for axis in (self._mesh.loss, self._mesh.tp):
            same_model(axis, module, made.told)
        self.options.check(made)
        return made

    def note(self) -> None:
        """Take note that the engine itself has changed weights and buffers, between steps."""
        self.buffers.rewritten()
        self.step.written.note()

    def release(self) -> None:
        """Take all hooks off the model, which another training takes over."""
        for each in (self.blocks, self._reducer, self.loop, self.step.states):
            if each is not None:
                each.close()
        self.options.release()
        for refusal in self._refusals:
            refusal.remove()
            grad_scaler.allow_for(self._given)

    def close(self, divided: bool, gather: bool = False) -> None:
        """Let go of the model: its parameters are plain ones again, where they are whole. `divided`: over
        tensor parallelism or a pipeline. `gather`: have sharded ones whole first; all ranks must call."""
        self.sleep.wake()
        self.step.clear()
        for bucket in self.placement.buckets if gather else ():
            if bucket.sharded:
                bucket.summon()
        self.release()
        for bucket in self.placement.buckets:
            bucket.settle()
            disown(bucket.parameters, whole=not divided and (gather or not bucket.sharded))
        self.updates.forget()
        self.placement.offload.close()

    def carry_from(self, old: Training, unchanged: set[int]) -> None:
        """Go on from another training of the same model, released: its weights, states and progress.
        `unchanged` are the ids of parameters that it has, too. All ranks must call."""
        if len(old.options.groups) == len(self.options.groups):
            for update in self.updates:  # states that there are by what a script has set go with the rest
                update.state.try_options([[*old.options.groups]], {})
        carry(old.placement, list(old.updates), self.placement, list(self.updates), unchanged)
        self.step.load_state_dict(old.step.state_dict())
        self.step.written.note()
        self.step.flags, self.step.clips_unasked = old.step.flags, old.step.clips_unasked
        self.contents.loaders, self.contents.positions = old.contents.loaders, old.contents.positions
        self.source, self._view = old.source, old._view
        self.source.options, self.source.updates = self.options, self.updates
        old.placement.offload.close()


LOOK_EVERY = 16
"""In one of so many steps each parameter of the user's own optimizer is compared with those that it had."""


_REGROUPED = (
    "the groups of the optimizer were changed in the middle of a step: call add_param_group after step(), "
    "before the next backward. engine.zero_grad() drops the gradients of this step, which may begin again"
)
