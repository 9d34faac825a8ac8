"""The mechanisms that train a model placed in buckets: made once, and again after the model was changed.

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
from polyreme.offload.store import Store
from polyreme.optim.groups import Recipe, recipe, refuse_foreign
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.optim.options import Options
from polyreme.placement.build import Built
from polyreme.placement.placement import Placement
from polyreme.placement.refresh import transfer_state
from polyreme.step.engine_context import EngineContext
from polyreme.step.loss.graph import refuse_tables
from polyreme.step.loss.objective import Objective
from polyreme.step.memory.fit import FirstBatch
from polyreme.step.passes import Passes
from polyreme.step.replicas import Replicas
from polyreme.step.sentinels import WithoutGradient
from polyreme.step.state.engine_state import EngineState, Loaded, adapters, adapters_alone, payload, restore
from polyreme.step.step import Step
from polyreme.step.totals import StepSums
from polyreme.step.user import given_gradients, other_optimizers
from polyreme.step.user.loop import UserLoop
from polyreme.tensor.gradient_states import GradientStates
from polyreme.tensor.states import LOCAL, WHOLE
from polyreme.zero.changes import ModelSnapshot
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import Restriction, disown
from polyreme.zero.reduce import Reducer
from polyreme.zero.sharded_optimizer import ShardedOptimizer
from polyreme.zero.sleep import Sleep


class Training:
    """Calls a model as it is now, and gathers, reduces and updates the buckets of `placement`.

    snapshot: the model's parameters when this was made. loop: the calls of the user's own loop. engine_state:
    all that a checkpoint has."""

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
        """made: the optimizers. built: the placed model. alike: buffers that are computed alike on all ranks.
        first: finds how many samples fit, if the config leaves that open."""
        settings, mesh, given = context.settings, context.mesh, context.optimizer
        placement = built.placement
        self.context, self.placement, self.objective = context, placement, objective
        self.pipeline = settings.pipeline()
        self.activations, self.saver = context.activations, context.saver
        self.activations.wrap(module, built.blocks)
        if context.sequences is not None:
            context.sequences.attach(module, built.blocks)
        cuts = placement.division.parameters
        sharded = {slot.name for each in placement.buckets if each.sharded for slot in each.layout.slots}
        divided = {name for name in cuts if not cuts[name].cut.is_whole}
        self.buffers = Buffers(module, mesh, settings.buffers, alike, sharded, divided)
        self.reducer = Reducer(
            placement.trainable,
            self.pipeline.mine,
            gathers=any(bucket.sharded for bucket in placement.buckets),
            states=_gradient_states(placement, settings.sequence_parallel, mesh),
        )
        zero, complete = settings.zero, self.reducer.complete
        self.blocks = Blocks(module, placement.root, placement.units, zero.prefetch, zero.release, complete)
        formats = settings.optimizer.states
        self.sharded_optimizer = ShardedOptimizer(
            placement.trainable, placement.offload, made.groups, None if formats == "fp32" else formats
        )
        led = given if isinstance(given, Optimizer) else None
        self.options = Options(made, LRSchedule(settings.lr_schedule), context.scheduler, led)
        factor = mesh.tp.alone() * self.pipeline.counts(mesh.pp)
        on, every = settings.sentinels.enabled, settings.sentinels.every
        replicas = Replicas(placement, mesh, every) if on and mesh.world_size > 1 else None
        gradients = WithoutGradient(placement.trainable, mesh, every) if on else None
        over_ranks = settings.batches.now.mean == "ranks"
        sums = StepSums(mesh, factor, self.options, over_ranks, replicas, gradients)
        unasked = given is not None and "clip" not in settings.optimizer.model_fields_set
        reducer, optimizer = self.reducer, self.sharded_optimizer
        self.step = Step(settings, sums, placement, reducer, self.blocks, optimizer, self.buffers, unasked)
        self.options.on_metric(self.step.plateau)
        trained = [parameter for bucket in placement.trainable for parameter in bucket.parameters]
        self.loop = UserLoop(module, objective, settings.batches, self.step, reducer, trained)
        self.passes = Passes(context, self.pipeline, built.stages, objective, self.step, self.blocks, first)
        self.sleep = Sleep(placement.buckets, optimizer)
        optimizers, loaders = list(optimizer), context.loaders
        self.engine_state = EngineState(
            module, settings, mesh, placement, optimizers, self.step, context.randomness, loaders
        )
        self.snapshot = ModelSnapshot(module)
        context.shown.follow(self.options, optimizer)
        self._refusals = []
        if led is not None:
            self._refusals += other_optimizers.refuse_calls(led)

    @property
    def stores(self) -> list[Store]:
        """All memory and files outside of the device."""
        offload = self.activations.offload
        return [*self.placement.offload.stores, *([] if offload is None else [offload.store])]

    def follow_script(self, model: nn.Module, refresh: Callable[[], None]) -> None:
        """Check for changes that a script made, before a step and other uses of the model. Calls `refresh`
        where it changed the groups of its own optimizer; raises OrderError for that in the middle of a step,
        and ModelError for changes of the model."""
        if not self.options.regrouped(thorough=self.step.state.step % COMPARE_EVERY == 0):
            self.snapshot.check(model)
        elif self.step.begun:
            raise OrderError(_REGROUPED)
        else:
            refresh()

    def recipe_of(self, module: nn.Module) -> Recipe:
        """Return the recipe of the model as it is now, the same on all ranks, which must call. Raises
        ModelError where training cannot continue with it."""
        mesh, given = self.context.mesh, self.context.optimizer
        refuse_tables(module, self.context.settings.batches.now.accumulation * mesh.world_size)
        made = recipe(module, self.context.settings.optimizer, given)
        refuse_foreign(module, given, self.options.parameters)
        given_gradients.refuse_older(module, made, self.placement)
        for axis in (mesh.loss, mesh.tp):
            same_model(axis, module, made.to_compare)
        self.options.check(made)
        return made

    def save(self, path: Path, tokenizer: Any, extra: Mapping[str, Any], wait: bool, only: bool) -> None:
        """See `Engine.save`. only: the adapters alone. A script's writes to weights must have been taken in
        before."""
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

    def raise_failed_save(self) -> None:
        """Raise CheckpointError on every rank, before the same step, if a checkpoint written in the
        background failed."""
        if self.step.take_unsaved():
            self.saver.wait()
        self.step.flags.unsaved = self.saver.failed

    def note(self) -> None:
        """Note that the engine itself has changed weights and buffers, between steps."""
        self.buffers.note_loaded()
        self.step.user_writes.note()

    def release(self) -> None:
        """Remove all hooks from the model, which another training takes over."""
        for each in (self.blocks, self.reducer, self.loop, self.step.states):
            if each is not None:
                each.close()
        self.options.release()
        for refusal in self._refusals:
            refusal.remove()

    def close(self, divided: bool, gather: bool = False) -> None:
        """Release the model, and make its parameters plain where they are whole. `divided`: by tensor
        parallelism or a pipeline. `gather`: make sharded parameters whole first; all ranks must call."""
        self.sleep.wake()
        with suppress(TransportError):  # a rank has failed, which was reported already
            self.step.clear()
        for bucket in self.placement.buckets if gather else ():
            if bucket.sharded:
                bucket.expose_whole()
        self.release()
        for bucket in self.placement.buckets:
            with suppress(TransportError):
                bucket.settle()
            disown(bucket.parameters, whole=not divided and (gather or not bucket.sharded))
        self.sharded_optimizer.forget()
        self.placement.offload.close()
        self.activations.close()

    def continue_from(self, old: Training, unchanged: set[int]) -> None:
        """Continue from another training of the same model, which was released: its weights, states and
        progress. `unchanged`: ids of parameters that both have. All ranks must call."""
        if len(old.options.groups) == len(self.options.groups):
            for (
                optimizer
            ) in self.sharded_optimizer:  # states that depend on options set by a script are transferred, too
                optimizer.state.try_options([[*old.options.groups]], {})
        transfer_state(
            old.placement,
            list(old.sharded_optimizer),
            self.placement,
            list(self.sharded_optimizer),
            unchanged,
        )
        self.step.continue_from(old.step)
        old.placement.offload.close()


def _gradient_states(placement: Placement, sequence_parallel: bool, mesh: Mesh) -> GradientStates | None:
    """Return the tracker of which gradients are whole under tensor parallelism; None without it."""
    if mesh.tp.size == 1:
        return None
    divided = placement.division.parameters
    parameters = {
        parameter: (slot.name, divided[slot.name].cut)
        for bucket in placement.buckets
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
    }
    between = LOCAL if sequence_parallel else WHOLE
    return GradientStates(mesh.tp, parameters, Restriction, between if mesh.pp.size > 1 else None)


COMPARE_EVERY = 16
"""One of so many steps compares every parameter of the user's own optimizer with those that it had."""


_REGROUPED = (
    "the groups of the optimizer were changed in the middle of a step: call add_param_group after step(), "
    "before the next backward. engine.zero_grad() drops the gradients of this step, which may begin again"
)
