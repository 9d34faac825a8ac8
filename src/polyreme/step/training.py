"""The mechanisms that train a model as it is placed in buckets: made at first, and anew of a model that was
changed.

Communication: none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polyreme.distributed.agreement import same_model
from polyreme.distributed.mesh import Mesh
from polyreme.errors import OrderError, TransportError
from polyreme.models.buffers import Buffers
from polyreme.optim.groups import Recipe, recipe, refuse_foreign
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.optim.options import Options
from polyreme.placement.build import Built
from polyreme.placement.placement import Placement
from polyreme.placement.refresh import carry
from polyreme.step.engine_context import EngineContext
from polyreme.step.loss.graph import refuse_tables
from polyreme.step.loss.objective import Objective
from polyreme.step.memory.fit import FirstBatch
from polyreme.step.passes import Passes
from polyreme.step.replicas import Replicas
from polyreme.step.state.engine_state import EngineState, Loaded, adapters, adapters_alone, payload, restore
from polyreme.step.step import Step
from polyreme.step.totals import StepSums
from polyreme.step.user import given_gradients, other_optimizers
from polyreme.step.user.loop import Loop
from polyreme.tensor.gradient_states import GradientStates
from polyreme.tensor.states import PART, WHOLE
from polyreme.zero.changes import Roster
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import Restriction, disown
from polyreme.zero.reduce import Reducer
from polyreme.zero.sleep import Sleep
from polyreme.zero.updates import Updates


class Training:
    """Calls a model as it is now, and gathers, reduces and updates the buckets of `placement`.

    `roster` knows what the model had when this was made, `loop` what the user's own loop called, and
    `engine_state` all that a checkpoint has."""

    def __init__(
        self,
        module: nn.Module,
        made: Recipe,
        built: Built,
        objective: Objective,
        alike: Collection[Tensor],
        context: EngineContext,
        first: FirstBatch | None = None,
    ) -> None:
        """`made`: the optimizers. `built`: where the model lies. `alike`: buffers that ranks compute alike.
        `first`: what is still to tell how batches are cut."""
        settings, mesh, given = context.settings, context.mesh, context.optimizer
        placement = built.placement
        self.context, self.placement, self.objective = context, placement, objective
        self.pipeline = settings.pipeline()
        self.activations, self.saver = context.activations, context.saver
        self.activations.wrap(module, built.blocks)
        cuts = placement.division.shardings
        sharded = {slot.name for each in placement.buckets if each.sharded for slot in each.layout.slots}
        divided = {name for name in cuts if not cuts[name].cut.is_whole}
        self.buffers = Buffers(module, mesh, settings.buffers, alike, sharded, divided)
        self._reducer = Reducer(
            placement.trainable,
            self.pipeline.mine,
            gathers=any(bucket.sharded for bucket in placement.buckets),
            states=_gradient_states(placement, settings.sequence_parallel, mesh),
        )
        zero, complete = settings.zero, self._reducer.complete
        self.blocks = Blocks(module, placement.root, placement.units, zero.prefetch, zero.release, complete)
        formats = settings.optimizer.states
        self.updates = Updates(
            placement.trainable, placement.offload, made.groups, None if formats == "fp32" else formats
        )
        led = given if isinstance(given, Optimizer) else None
        self.options = Options(made, LRSchedule(settings.lr_schedule), context.scheduler, led)
        tells, over_ranks = (
            mesh.tp.alone() * self.pipeline.counts(mesh.pp),
            settings.batches.now.mean == "ranks",
        )
        replicas = Replicas(placement, mesh) if mesh.axis("tp", "pp").size > 1 else None
        sums = StepSums(mesh, tells, self.options, over_ranks, replicas)
        unasked = given is not None and "clip" not in settings.optimizer.model_fields_set
        self.step = Step(
            settings, sums, placement, self._reducer, self.blocks, self.updates, self.buffers, unasked
        )
        self.options.on_metric(self.step.plateau)
        trained = [parameter for bucket in placement.trainable for parameter in bucket.parameters]
        self.loop = Loop(module, objective, settings.batches, self.step, self._reducer, trained)
        self.passes = Passes(context, self.pipeline, built.stages, objective, self.step, self.blocks, first)
        self.sleep = Sleep(placement.buckets, self.updates)
        updates, loaders = list(self.updates), context.loaders
        self.engine_state = EngineState(
            module, settings, mesh, placement, updates, self.step, context.randomness, loaders
        )
        self.roster = Roster(module)
        context.shown.follow(self.options, self.updates)
        self._refusals = []
        if led is not None:
            self._refusals += other_optimizers.refuse_calls(led)

    def look(self, model: nn.Module, refresh: Callable[[], None]) -> None:
        """Before a step or what else depends on the model: `refresh` where a script has changed the groups of
        its own optimizer. Raises OrderError for that in the middle of a step, and ModelError for changes of
        the model."""
        if not self.options.regrouped(thorough=self.step.state.step % LOOK_EVERY == 0):
            self.roster.check(model)
        elif self.step.begun:
            raise OrderError(_REGROUPED)
        else:
            refresh()

    def recipe_of(self, module: nn.Module) -> Recipe:
        """The recipe of the model as it is now, the same on all ranks, which must call. Raises ModelError
        where this cannot go on by it."""
        mesh, given = self.context.mesh, self.context.optimizer
        refuse_tables(module, self.context.settings.batches.now.accumulation * mesh.world_size)
        made = recipe(module, self.context.settings.optimizer, given)
        refuse_foreign(module, given, self.options.parameters)
        given_gradients.refuse_older(module, made, self.placement)
        for axis in (mesh.loss, mesh.tp):
            same_model(axis, module, made.told)
        self.options.check(made)
        return made

    def save(self, path: Path, tokenizer: Any, extra: Mapping[str, Any], wait: bool, only: bool) -> None:
        """See `Engine.save`; only: the adapters. What a script wrote to weights has been taken in before."""
        self.sleep.refuse()
        engine = self.engine_state
        names = adapters_alone(engine) if only else None
        whole = adapters(engine)
        self.saver.save(path, lambda: payload(engine, tokenizer, extra, whole, names), background=not wait)

    def load(self, path: Path, strict: bool, weights_only: bool) -> Loaded:
        """See `Engine.load`."""
        self.sleep.refuse()
        self.saver.wait()
        self.saver.idle()
        found = restore(self.engine_state, path, strict, weights_only, self.saver.axis())
        self.note()
        return found

    def tell_failed(self) -> None:
        """Raise CheckpointError on every rank, before one and the same step, if a checkpoint being written in
        the background failed."""
        if self.step.hears_unsaved():
            self.saver.wait()
        self.step.flags.unsaved = self.saver.failed

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

    def close(self, divided: bool, gather: bool = False) -> None:
        """Let go of the model: its parameters are plain ones again, where they are whole. `divided`: over
        tensor parallelism or a pipeline. `gather`: have sharded ones whole first; all ranks must call."""
        self.sleep.wake()
        with suppress(TransportError):  # a rank has failed, as was said where it was waited for
            self.step.clear()
        for bucket in self.placement.buckets if gather else ():
            if bucket.sharded:
                bucket.summon()
        self.release()
        for bucket in self.placement.buckets:
            with suppress(TransportError):
                bucket.settle()
            disown(bucket.parameters, whole=not divided and (gather or not bucket.sharded))
        self.updates.forget()
        self.placement.offload.close()
        self.activations.close()

    def carry_from(self, old: Training, unchanged: set[int]) -> None:
        """Go on from another training of the same model, released: its weights, states and progress.
        `unchanged` are the ids of parameters that it has, too. All ranks must call."""
        if len(old.options.groups) == len(self.options.groups):
            for update in self.updates:  # states that there are by what a script has set go with the rest
                update.state.try_options([[*old.options.groups]], {})
        carry(old.placement, list(old.updates), self.placement, list(self.updates), unchanged)
        self.step.go_on_from(old.step)
        old.placement.offload.close()


def _gradient_states(placement: Placement, sequence_parallel: bool, mesh: Mesh) -> GradientStates | None:
    """What follows gradients over tensor parallelism."""
    if mesh.tp.size == 1:
        return None
    shardings = placement.division.shardings
    parameters = {
        parameter: (slot.name, shardings[slot.name].cut)
        for bucket in placement.buckets
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
    }
    between = PART if sequence_parallel else WHOLE
    return GradientStates(mesh.tp, parameters, Restriction, between if mesh.pp.size > 1 else None)


LOOK_EVERY = 16
"""In one of so many steps each parameter of the user's own optimizer is compared with those that it had."""


_REGROUPED = (
    "the groups of the optimizer were changed in the middle of a step: call add_param_group after step(), "
    "before the next backward. engine.zero_grad() drops the gradients of this step, which may begin again"
)
