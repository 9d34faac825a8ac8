"""Engine: the mechanisms put together. Reads like a table of contents; the work is done in the modules it
names.

A step is a table (`pipeline.schedule`) executed by `pipeline.executor`: forward and backward of every
micro-batch, reduce, update. A model is divided over pipeline stages, then over tensor parallelism, and the
rest over data parallelism, by ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polyreme.checkpoint.save import Saver
from polyreme.config import Config
from polyreme.data import Loader
from polyreme.distributed.agreement import known_as, same_model, same_scheduler
from polyreme.distributed.mesh import Mesh
from polyreme.distributed.watch import Watch, collective
from polyreme.distributed.world import current
from polyreme.errors import WARNS, BatchError, ModelError
from polyreme.models import huggingface
from polyreme.models.batch_norm import normalise
from polyreme.models.patches import Patches
from polyreme.offload.host_allocator import give_freed_memory_back, keep_freed_memory
from polyreme.optim.groups import Make, recipe, refuse_foreign, warn_of_unused
from polyreme.pipeline.executor import Whole
from polyreme.placement.build import Built, build, shard_model
from polyreme.placement.dividing import divide_again
from polyreme.placement.full_parameters import readable, writable
from polyreme.placement.opening import Model
from polyreme.placement.refresh import refuse_own_shapes
from polyreme.step.batch.batches import BatchComparison, micro_batches
from polyreme.step.batch.loaders import Loaders
from polyreme.step.engine_context import EngineContext
from polyreme.step.loss.objective import LossFn
from polyreme.step.memory import report
from polyreme.step.memory.activations import Activations
from polyreme.step.memory.out_of_memory import explains_out_of_memory
from polyreme.step.passes import EvalResult
from polyreme.step.precision import AUTOCAST, DTYPES, master_dtype
from polyreme.step.sentinels import Spikes
from polyreme.step.settings import (
    first_batch,
    lighten,
    objective,
    opened,
    pipeline_rank,
    placement_settings,
    sequences_of,
    training_settings,
)
from polyreme.step.state.engine_state import Loaded
from polyreme.step.state.progress import TrainingState
from polyreme.step.state.randomness import Randomness, RandomUse
from polyreme.step.step import Step, StepResult
from polyreme.step.training import Training
from polyreme.step.user.arguments import one_batch
from polyreme.step.user.grad_mode import with_gradients
from polyreme.step.user.gradients import Gradients
from polyreme.step.user.module_face import ModuleFace
from polyreme.step.user.optimizer_view import OptimizerView
from polyreme.step.user.parameter_numbers import ParameterNumbers
from polyreme.tensor.rng import restore_rng_states, rng_states
from polyreme.zero.bucket import MEMORY_KINDS, MemoryKind
from polyreme.zero.parameter import give_to, name_of, refuse_owned


class Engine(ModuleFace):
    """A model under training, made by `initialize`.

    `module` is the user's model (its parameters are in buckets now), `config` the resolved config, `mesh` the
    axes. `patches`: changes of the model that `close` undoes; a door adds its own."""

    config: Config
    patches: Patches
    _now: Training | TrainingState

    def __init__(
        self,
        model: Model,
        config: Config,
        mesh: Mesh,
        optimizer: Optimizer | type[Optimizer] | Make | None = None,
        lr_scheduler: Any = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        vars(self).update(config=config, mesh=mesh, patches=Patches())
        if mesh.device.type == "cpu":
            (keep_freed_memory if config.memory.all_on_device else give_freed_memory_back)()
        if isinstance(model, nn.Module):
            refuse_owned(model)
        WARNS.set(mesh.rank == 0)
        randomness, outside = Randomness(config.seed, mesh), rng_states(mesh.device)
        self.module, recording, weights = opened(model, config, mesh)
        blocks = huggingface.find_blocks(self.module)
        made = recipe(self.module, config.optimizer, optimizer)
        refuse_foreign(self.module, optimizer)
        warn_of_unused(config.optimizer, optimizer, made)
        facts = {"built here": recording is not None, "weights": weights is not None, "blocks": list(blocks)}
        facts |= {"lr_scheduler": known_as(lr_scheduler), "loss_fn": known_as(loss_fn), **made.to_compare}
        same_model(mesh.control_axis(), self.module, {**facts, "optimizer": made.groups})
        sequences = sequences_of(self.module, config, mesh, loss_fn is None, self.patches)
        first = first_batch(self.module, config)
        self._parameter_count = sum(p.numel() for p in self.module.parameters())
        self.on_gradients: Callable[[Gradients], object] | None = None
        """A callback before each update, of `train_step` too, on all ranks: to log norms, or to clip."""
        self._trains = any(p.requires_grad for p in self.module.parameters())
        pipeline = pipeline_rank(config, mesh)
        settings = placement_settings(config, mesh.device)
        built = build(self.module, recording, made, blocks, pipeline, settings, mesh, weights=weights is None)
        lighten(self.module, built.blocks, config, mesh, self.patches)
        alike, called = self._normalised(), objective(self.module, _checked(loss_fn), made, config, mesh)
        activations = Activations(
            config.memory, config.compile, mesh.device, self.patches, mesh.computes_on == "cpu"
        )
        loaders = Loaders(mesh, config.batch.size, config.seed, config.data.shuffle)
        training, saver = training_settings(config, mesh), Saver(mesh.control_axis)
        spikes = Spikes(config.sentinels.spike if config.sentinels.enabled else None)
        parts = activations, saver, loaders, spikes, sequences
        context = EngineContext(training, mesh, optimizer, lr_scheduler, randomness, *parts)
        self._now = Training(self.module, made, built, called, alike, context, first)
        give_to(self, self.module)
        if lr_scheduler is not None:
            same_scheduler(mesh.control_axis(), self._now.options.state_dict())
        if weights is not None:
            self._now.load(weights, strict=False, weights_only=True)
        self._unfinished = False  # True if the last train_step ended in an error
        self._comparison = BatchComparison(mesh, config.sentinels)
        restore_rng_states(outside, mesh.device)  # the script draws the same numbers as without an engine

    @property
    def state(self) -> TrainingState:
        """The progress of training: step, samples, tokens, lr, loss_scale."""
        return self._now if isinstance(self._now, TrainingState) else self._now.step.state

    # ---- one optimizer step

    @collective
    @with_gradients
    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this data-parallel rank's share of one global batch.

        batch: mapping, tuple or tensor whose tensors have the leading dimension batch.size / dp (micro-batch
        x accumulation), or after the first step less, even 0; or a list of micro-batches, passed on as they
        are. Raises BatchError for a batch of another size, or where ranks of a tp or pp line have different
        ones in the first step; and NumericsError for NaN or Inf without dynamic loss scale (unless
        precision.on_nonfinite says what to do)."""
        self._refuse_frozen()
        self._check_mode()
        self._training.raise_failed_save()
        training = self._followed()
        step, passes = training.step, training.passes
        cut = micro_batches(batch, training.context.settings.batches.now, first=not self.state.step)
        self._refuse_within_step("train_step")
        self._comparison.compare(batch, self.state.step)
        self._comparison.warn(self.state.step)
        cut = passes.fitted(batch, cut)
        step.count_microbatches()
        if self._unfinished:
            step.begin()
        self._unfinished = True
        drawing = training.context.randomness.inside(self.state.step, "step")
        with passes.step(cut) as row, drawing as leave:
            for action in row:
                match action.op:
                    case "F":
                        row.forward(action)
                    case "B":
                        row.backward(action)
                    case "W":
                        row.weight_gradients(action)
                    case "SA" | "SG":
                        row.send(action)
                    case "RA" | "RG":
                        row.receive(action)
                    case "R":
                        continue  # begun by a stage's last backward, and ended for all stages together, below
                    case "U":
                        leave()  # the user's callbacks see the same generators on all ranks
                        step.reduce()
                        result = self._end_step()
        self._unfinished = False
        return result

    @collective
    @with_gradients
    def eval_step(self, batch: Any) -> EvalResult:
        """Return the mean loss over a global batch of any size; nothing is updated. `batch` is this rank's
        share, or a list of its micro-batches.

        The modules are in evaluation mode meanwhile."""
        return self._followed().passes.evaluate(self.module, batch)

    @collective
    @with_gradients
    def eval_outputs(self, batch: Any, function: Callable[[Any, Any], Any]) -> list[Any]:
        """Return `function(output, micro-batch)` for each micro-batch of `batch` (as in `eval_step`) on the
        last pipeline stage, and an empty list on other ranks. No gradients, and the modules are in evaluation
        mode meanwhile. All ranks must call."""
        _refuse_parts(self._training)
        return self._followed().passes.outputs(self.module, batch, function)

    # ---- the loop people already have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for one micro-batch. Floating-point inputs are cast to the compute dtype,
        `labels` are not.

        Of a mapping whose sequences mesh.cp divides, the loss is that of the whole micro-batch, and logits
        and hidden states are those of this rank's part. All ranks of a cp line call then, with the same."""
        _refuse_stages(self.mesh)
        training = self._followed()
        training.passes.enter(0, 0)
        # before the batch is copied to the device
        batch = kwargs or (args[0] if len(args) == 1 and not isinstance(args[0], list) else args)
        self._comparison.compare(batch, self.state.step)
        use: RandomUse = "forward" if torch.is_grad_enabled() else "look"
        drawing = training.context.randomness.inside(self.state.step, use)
        with training.passes.autocast(), training.loop.inside(batch) as forward, drawing:
            output, forward.weight = training.passes.call(args, kwargs)
        # outside of autocast, as the caller may compute the loss there
        if self.config.precision.compute in AUTOCAST:
            output = training.objective.cast(output)
        training.loop.forward(forward, output)
        return output

    @collective
    @with_gradients
    def backward(
        self, loss: Tensor, weight: float | None = None, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        """Run the backward of one micro-batch's mean loss; call it batch.size / (dp x micro) times a step.

        weight: the number that the loss is a mean over; by default the labels of the last micro-batch, or its
        samples. last: False if another loss of the same micro-batch follows, to be added to this one.
        retain_graph: keep the graph for it."""
        self._refuse_frozen()
        self._training.loop.backward(loss, weight, last, retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch times the loss scale of fp16 (1 otherwise), for a `backward()` of
        the caller's own that comes next: `engine.scale(loss).backward()`."""
        return self._step.scale(loss)

    def set_boundary(self, is_last: bool, extend: bool = False, own: float = 1.0) -> None:
        """Set whether the coming backward, and each one after it until the next call, is the last of its
        step. From now on the caller decides how many micro-batches a step has, not batch.size. All ranks say
        the same.

        extend: whether a backward between the last one and `step` is added, by another reduction, instead of
        an error. own: the factor on losses whose `backward()` the caller begins, with batch.mean = "ranks".
        Raises BatchError on stages of a pipeline, whose schedule is fixed, and for several micro-batches
        where batch.size makes one and gradients are in files."""
        self._step.set_boundary(is_last, extend, own)

    @collective
    @with_gradients
    def step(self, last: bool = False) -> StepResult:
        """Make the optimizer step that ends a loop of forward and backward calls. Raises OrderError before
        the last of them.

        last: the data ends here, so there may have been fewer, and the step is that of those. Every rank has
        had the same number."""
        self._complete("step", last)
        return self._end_step()

    @with_gradients
    def gradients(self, last: bool = False) -> Gradients:
        """Return the gradients that `step` will apply, to read and to clip, after the last backward of a
        step. All ranks call. last: see `step`."""
        self._complete("gradients", last)
        return Gradients(self._training.placement, self.mesh, self._step)

    def numbers(self, parameter: nn.Parameter) -> ParameterNumbers:
        """Return access to the master, the gradient and the optimizer states of one parameter, to read and
        write: whole, or this rank's shard. Raises ModelError for a parameter that is not this engine's."""
        return ParameterNumbers(parameter, lambda: self._training, partial(self._complete, "numbers"))

    def _complete(self, call: str, last: bool = False) -> None:
        """End the backward calls of a step. Raises OrderError where that is too early for `call`."""
        self._refuse_frozen()
        self._step.complete(call, last)
        self._training.raise_failed_save()
        self._comparison.warn(self.state.step)
        self._followed().step.reduce()

    # ---- around training

    @property
    def optimizer(self) -> OptimizerView:
        """The optimizer for a user's loop or scheduler: `param_groups`, with the options of the next step,
        `state`, `step` and `zero_grad`."""
        return self._training.context.shown.view(self)

    @with_gradients
    def plateau(self, metric: float) -> float:
        """Step the `lr_scheduler`, a ReduceLROnPlateau, by a metric such as a validation loss, and return the
        new learning rate.

        The mean of the ranks' metrics counts, so that all change their rate together. All ranks must call.
        Raises ConfigError where the scheduler takes no metric."""
        return self._step.plateau(float(metric))

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop: `StepResult.stop` is true on every rank in the step under way or the next
        one.

        For signal handlers: it communicates nothing itself. The caller decides what to do, such as to save
        and leave the loop."""
        if isinstance(self._now, Training):
            self._now.step.flags.stop = True

    def loader(self, dataset: Any, **options: Any) -> Loader:
        """Return a loader of this rank's batches of `dataset`: shuffled by the config's seed, the same global
        batches at any number of ranks. Options are those of `polyreme.data.Loader`. Checkpoints keep the
        place of loaders without `epochs`."""
        return self._training.context.loaders.make(dataset, options)

    @collective
    def save(
        self,
        path: str | Path,
        tokenizer: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        adapters_only: bool = False,
    ) -> Path:
        """Write a checkpoint: a Hugging Face directory, with everything that `load` continues from. All ranks
        must call, and each writes its shards.

        tokenizer: its files are written, too. extra: the caller's own values, as JSON can hold them; `load`
        returns them. wait: return once it is written; without, it is copied to host memory and written while
        training continues, and an error comes with a later step or call. adapters_only: of a PEFT model, its
        adapters and their optimizer states, without the base.

        Raises CheckpointError on every rank; the earlier contents of the path are then still there. Raises
        ModelError for adapters_only where other parameters train, too."""
        self._followed()
        self._take_in_writes()
        self._training.save(Path(path), tokenizer, extra or {}, wait, adapters_only)
        return Path(path)

    @collective
    @with_gradients
    def load(self, path: str | Path, *, strict: bool = True, weights_only: bool = False) -> Loaded:
        """Continue from a checkpoint of any layout, or from the newest complete one in a run's folder; or
        take the weights of any Hugging Face directory. All ranks must call.

        strict: the checkpoint must have all tensors of the model, and no others. weights_only: skip optimizer
        states, random numbers and the place in the data. Raises CheckpointError on every rank where that is
        impossible; nothing has changed then."""
        self._refuse_within_step("load")
        self._followed()
        self.wait()
        self._take_in_writes()
        found = self._training.load(Path(path), strict, weights_only)
        self._unfinished = False
        return found

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved in the background is written. Raises CheckpointError
        where it failed."""
        self._training.saver.wait()

    @with_gradients
    def refresh(self) -> None:
        """Take in a script's changes of the module since `initialize`: parameters unfrozen, added, replaced
        or removed, modules too, and `engine.module` itself (`engine.module =
        peft.get_peft_model(engine.module, ...)`). Every rank must have made the same changes, and must call,
        between two steps. Unchanged parameters keep their weights and optimizer states; new ones begin with
        rank 0's numbers, and newly frozen ones lose their states. The optimizer's groups are made as at
        first.

        Raises ModelError where that is impossible (see docs/engine.md); nothing has changed then."""
        self._refuse_within_step("refresh")
        self._training.sleep.refuse()
        self.wait()
        self._take_in_writes()
        for axis in (self.mesh.loss, self.mesh.tp):
            same_model(axis, self.module, {})
        old, unchanged = self._training, self._training.placement.unchanged
        refuse_own_shapes([*old.sharded_optimizer])
        settings = placement_settings(self.config, self.mesh.device)
        division = divide_again(self.module, old.snapshot, old.placement.division, settings, self.mesh)
        made = old.recipe_of(self.module)
        called, alike = old.objective.of(self.module), self._normalised()
        old.release()
        blocks = huggingface.find_blocks(self.module)
        placement = shard_model(self.module, blocks, made, division, settings, self.mesh, unchanged)
        built = Built(placement, {0: Whole()}, blocks)
        self._now = Training(self.module, made, built, called, alike, old.context)
        give_to(self, self.module)
        self._now.continue_from(old, unchanged)
        self._trains = any(p.requires_grad for p in self.module.parameters())
        if self.mesh.tp.size == 1:
            self._parameter_count = sum(p.numel() for p in self.module.parameters())

    @contextmanager
    def full_parameters(
        self, write: bool = False, among: Iterable[nn.Parameter] | None = None, rank: int = 0
    ) -> Iterator[nn.Module]:
        """Yield the module with all parameters whole. Every rank must enter. Those that are sharded are in
        memory of their own, which may be kept; without `write` the others are the parameters that are
        trained.

        write: the parameters' values at the end go to weights and masters of every rank, unless the block
        ends in an error; of a parameter that several ranks have, those of `rank` count. In bf16 a master
        keeps its digits where the parameter did not change. among: only these parameters are needed; others
        of their buckets are whole, too. Raises ModelError where parameters were changed without `write`, and
        OrderError for writing in the middle of a step."""
        if self._training.blocks.in_forward:
            raise ModelError(_IN_FORWARD)
        if torch.is_grad_enabled() and self._training.blocks.awaits_backward:
            raise ModelError(_BEFORE_BACKWARD)
        with current().of(Watch).calling("full_parameters"):
            self._take_in_writes()
        names = None if among is None else {*map(name_of, among)}
        if not write:
            with readable(self._training.placement, names, by_user=True):
                yield self.module
            return
        self._refuse_within_step("full_parameters(write=True)")
        with writable(self._training.placement, names, self.mesh.places(rank)):
            yield self.module
            self._training.saver.wait_until_copied()
        self._step.user_writes.note()

    def _take_in_writes(self) -> None:
        """Take the user's writes to parameters between steps into the masters. All ranks must call."""
        if not self._step.order.microbatches:
            self._step.user_writes.settle(self._training.saver.wait_until_copied)

    @with_gradients
    def sleep(
        self, *kinds: MemoryKind, pin: bool = True, since: str = "engine.sleep(): call engine.wake()"
    ) -> None:
        """Free the device of this engine between two steps, until `wake`. "params", "masters" (of parameters
        in 16 bits), "states" and "gradients" (whose buffers are dropped), or all where none is named, move to
        host memory, pinned unless `pin` is false. Memory on the host or in files stays there. All ranks must
        call.

        Calls that need memory that is away raise ModelError, which names `since`. Without states and masters,
        forwards, backwards and `full_parameters()` to read still work. Raises OrderError in the middle of a
        step."""
        self._refuse_within_step("sleep")
        self.wait()
        self._take_in_writes()
        self._training.sleep.sleep(kinds or MEMORY_KINDS, pin, since)

    @with_gradients
    def wake(self) -> tuple[MemoryKind, ...]:
        """Move everything that `sleep` took away back. Returns the kinds that were away, which may be
        none."""
        kinds = self._training.sleep.wake()
        if "params" in kinds:  # the parameters lie at other addresses now
            self._step.user_writes.note()
        return kinds

    def memory(self) -> dict[str, int]:
        """Return the bytes of this rank by category: parameters, gradients, states and buffers that are alive
        now, and activations, which the first micro-batch kept for its backward (0 before it, and for compiled
        blocks). These are bytes on the device; those that `memory` keeps elsewhere are in "parameters_host",
        "activations_files" and so on."""
        return report.memory(self._training)

    def working_set(self) -> dict[str, int]:
        """Return the most bytes of memory that a step takes on this rank, by category, once one was trained:
        those of `memory`, and those that come and go within a step. Without temporary memory of the model's
        operators, the buffers, and freed memory that the C library keeps."""
        return report.working_set(self._training, self.config.zero.prefetch)

    def tiers(self) -> dict[str, dict[str, float]]:
        """Return the use of memory outside the device, for `states`, `params`, `gradients` and `activations`:
        `bytes` held there, `memory` (bytes of host memory taken for it), and since the start bytes `read`
        from it and `written` to it, and seconds `waited`."""
        return report.tiers(self._training)

    def close(self, gather: bool = False) -> None:
        """Wait for a checkpoint that is being written, and undo everything that the engine did to the process
        and the model: hooks, forwards, threads, folders of `memory`. `with initialize(...) as engine:` does
        so at its end, and so does the end of the process.

        At stages 0 to 2 on the device, without tp and pp, the model is an ordinary one again, with the
        trained weights, and may be given to another engine. Otherwise this rank has shards of it, and code
        that needs its numbers raises ModelError. The engine cannot be used any more, except for `state`.
        Raises CheckpointError where the checkpoint failed, once everything is undone.

        gather: make parameters that ZeRO divides whole first, at stage 3 and from other memory too. All ranks
        must call then."""
        if isinstance(self._now, TrainingState):
            return
        if gather:
            self._take_in_writes()
        training, self._now = self._now, self.state
        try:
            training.saver.wait()
        finally:
            training.close(divided=self.mesh.tp.size * self.mesh.pp.size > 1, gather=gather)
            self.patches.undo()
            if self.mesh.tp.size > 1:
                self.module.register_forward_pre_hook(_refuse_closed, prepend=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- steps of the above

    def _refuse_frozen(self) -> None:
        if not self._trains:
            raise ModelError(_FROZEN)

    @property
    def _training(self) -> Training:  # type: ignore[override]
        """The current training of the model."""
        if isinstance(self._now, TrainingState):
            raise ModelError(_CLOSED)
        return self._now

    def _followed(self) -> Training:
        """Return the training, after taking in changes that a script made of its optimizer's groups."""
        self._training.follow_script(self.module, self.refresh)
        return self._training

    @property
    def _step(self) -> Step:
        return self._training.step

    def _normalised(self) -> set[Tensor]:
        """Set up batch norms by the config, and return the buffers that are the same on all ranks then."""
        dtype = master_dtype(DTYPES[self.config.precision.compute])
        return normalise(self.module, self.mesh.loss, self.config.batch_norm == "sync", dtype, self.patches)

    def _end_step(self) -> StepResult:
        """Show `on_gradients` the gradients; and update, once a save in progress has copied the weights."""
        if self.on_gradients is not None:
            self.on_gradients(Gradients(self._training.placement, self.mesh, self._step))
        self._training.saver.wait_until_copied()
        result, context = self._step.update_or_skip(), self._training.context
        spike = context.spikes.see({"loss": result.loss, "grad_norm": result.grad_norm})
        return replace(result, spike=spike + context.loaders.place()) if spike else result


for _name in ("__init__", "__call__", "train_step", "eval_step", "eval_outputs", "backward", "step"):
    setattr(Engine, _name, explains_out_of_memory(getattr(Engine, _name)))

for _name in ("gradients", "plateau", "refresh", "sleep"):
    setattr(Engine, _name, collective(getattr(Engine, _name)))
for _name in ("train_step", "eval_step", "eval_outputs"):
    setattr(Engine, _name, one_batch(getattr(Engine, _name)))

_CUT = "engine(...) calls the whole model, which is cut into pipeline stages: use train_step and eval_step"
_PARTS = (
    "eval_outputs has the output of this rank's part of each sequence alone (mesh.cp > 1, a context.method, "
    "or data.pack): use eval_step, or engine(batch) under torch.no_grad(), whose logits are of that part"
)
_CLOSED = "this engine is closed, by engine.close() or at the end of its `with` block: initialize another one"
_BEFORE_BACKWARD = (
    "full_parameters() between a forward and its backward: the memory of parameters is gone in the backward, "
    "which would read it. For a penalty over weights take optimizer.weight_decay, or compute it in the "
    "model's own forward and return it with the output. Call full_parameters() between steps, or inside of "
    "torch.no_grad() to look at numbers alone"
)
_IN_FORWARD = (
    "full_parameters() inside a forward of the module, from a hook or its own code: parameters come and go "
    "there. Call it before or after the forward; a forward hook of a block may read the parameters of that "
    "block as they are"
)
_FROZEN = (
    "every parameter of the model is frozen, so that there is nothing to update: set requires_grad on those "
    "to train before initialize(); to be called or evaluated, engine(...) and eval_step are there"
)


def _refuse_stages(mesh: Mesh) -> None:
    if mesh.pp.size > 1:
        raise BatchError(_CUT)


def _refuse_parts(training: Training) -> None:
    if training.context.sequences is not None:
        raise BatchError(_PARTS)


def _refuse_closed(module: nn.Module, *_: object) -> None:
    raise ModelError(
        f"{type(module).__name__} was called, of which this rank has a part (mesh.tp > 1), and its engine "
        "is closed: build the model anew, and load what engine.save wrote"
    )


def _checked(loss_fn: LossFn | None) -> LossFn | None:
    """Return a loss_fn. Raises ModelError for one that cannot be called, and for a class."""
    if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
        raise ModelError(
            f"loss_fn is {loss_fn!r:.80}: give a function of (output, target) that returns a mean loss, "
            "such as torch.nn.functional.cross_entropy, or an object like torch.nn.MSELoss()"
        )
    return loss_fn
