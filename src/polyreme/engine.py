"""initialize() and Engine: puts the mechanisms together. Reads like a table of contents; the work is done in
the modules it names.

A step is a table (`pipeline.schedule`) executed by `pipeline.executor`: forward and backward of every
micro-batch, reduce, update. A model is divided in this order: over pipeline stages, over tensor parallelism,
and what is left of it over data parallelism, by ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polyreme.checkpoint.save import Saver
from polyreme.config import Config
from polyreme.data import Loader
from polyreme.distributed.agreement import known_as, same_config, same_model, same_scheduler
from polyreme.distributed.mesh import Mesh, everyone
from polyreme.distributed.watch import Watch, collective
from polyreme.distributed.world import current
from polyreme.errors import WARNS, BatchError, ModelError
from polyreme.models import huggingface
from polyreme.models.batch_norm import normalise
from polyreme.models.patches import Patches
from polyreme.offload.host_allocator import give_freed_memory_back, keep_freed_memory
from polyreme.optim.groups import Make, recipe, refuse_foreign, warn_of_unused
from polyreme.pipeline.executor import Whole
from polyreme.placement.build import Built, build, share_out
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
from polyreme.step.memory.out_of_memory import tells_of_memory
from polyreme.step.passes import EvalResult
from polyreme.step.precision import AUTOCAST, DTYPES, cast_floating, master_dtype
from polyreme.step.settings import (
    first_batch,
    how_to_meet,
    objective,
    opened,
    pipeline_rank,
    placement_settings,
    training_settings,
)
from polyreme.step.state.engine_state import Loaded
from polyreme.step.state.progress import State
from polyreme.step.state.randomness import Kind, Randomness
from polyreme.step.step import Step, StepResult
from polyreme.step.training import Training
from polyreme.step.user.arguments import named_as_ours, one_batch
from polyreme.step.user.grad_mode import with_gradients
from polyreme.step.user.gradients import Gradients
from polyreme.step.user.module_face import ModuleFace
from polyreme.step.user.optimizer_view import OptimizerView
from polyreme.step.user.parameter_numbers import ParameterNumbers
from polyreme.tensor.rng import generators, go_on_from
from polyreme.zero.bucket import KINDS
from polyreme.zero.bucket import Kind as Numbers
from polyreme.zero.parameter import give_to, name_of, refuse_owned


@named_as_ours
@with_gradients
def initialize(
    model: Model,
    config: str | Path | Mapping[str, Any] | Config,
    *,
    optimizer: Optimizer | type[Optimizer] | Make | None = None,
    lr_scheduler: Any = None,
    loss_fn: LossFn | None = None,
) -> Engine:
    """Make `model` ready to train as `config` says, on all ranks of the process group (or of the environment;
    or this one process).

    model: a module (rank 0's weights count; with mesh.pp, other stages' parameters may be on the meta device,
        and each stage's own count), a function without arguments that builds one (then never built
        whole: its own initialisation is replayed tensor by tensor, with the config's seed), a sequence of
        layers or of such functions, one for each layer, to be called one after the other, or a Hugging Face
        model directory.
    config: a file, a mapping, or a Config.
    optimizer: a torch.optim class (lr, weight decay, groups and options from the config), a factory such as
        `lambda params: torch.optim.AdamW(params, lr=3e-4)` (which decides all that itself), an optimizer made
        of the model's parameters (whose class and groups the shards' optimizers have, and whose options, as
        they are at each step, they follow), or None: the config's.
    lr_scheduler: a torch scheduler, or a function of an optimizer that returns one: followed in place of the
        config's schedule, and stepped after every step.
    loss_fn: see `polyreme.step.loss.objective.LossFn`; None: the model returns its loss.

    Raises ConfigError with every problem of the config, and ModelError for a model that cannot be trained.
    """
    given = config
    ranks = everyone(*how_to_meet(lambda: Config.load(given)))
    config = same_config(ranks, lambda: Config.load(given).resolve(ranks.size))
    mesh = Mesh.open(
        config.axes,
        config.mesh.order,
        timeout=timedelta(seconds=config.mesh.timeout),
        shared_memory=config.mesh.shared_memory,
        backend=config.mesh.backend,
    )
    return Engine(model, config, mesh, optimizer, lr_scheduler, loss_fn)


class Engine(ModuleFace):
    """A model under training. Made by `initialize`.

    `module` is the user's model (its parameters live in buckets now), `config` the resolved config, `mesh`
    the axes, `patches` what `close` undoes of the model: a door adds its own."""

    config: Config
    patches: Patches

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
        randomness, outside = Randomness(config.seed, mesh), generators(mesh.device)
        self.module, recording, weights = opened(model, config, mesh)
        blocks = huggingface.find_blocks(self.module)
        made = recipe(self.module, config.optimizer, optimizer)
        refuse_foreign(self.module, optimizer)
        warn_of_unused(config.optimizer, optimizer, made)
        told = {"built here": recording is not None, "weights": weights is not None, "blocks": list(blocks)}
        told |= {"lr_scheduler": known_as(lr_scheduler), "loss_fn": known_as(loss_fn), **made.told}
        same_model(mesh.aside(), self.module, {**told, "optimizer": made.groups})
        first = first_batch(self.module, config)
        self._parameter_count = sum(p.numel() for p in self.module.parameters())
        self.on_gradients: Callable[[Gradients], object] | None = None
        """A callback before each update, of `train_step` too, on all ranks: to log norms, or to clip."""
        self._trains = any(p.requires_grad for p in self.module.parameters())
        pipeline = pipeline_rank(config, mesh)
        settings = placement_settings(config, mesh.device)
        built = build(self.module, recording, made, blocks, pipeline, settings, mesh, weights=weights is None)
        alike = self._normalised()
        called = objective(self.module, loss_fn, made, config, mesh)
        activations = Activations(config.memory, config.compile, mesh.device, self.patches)
        loaders = Loaders(mesh, config.batch.size, config.seed, config.data.shuffle)
        context = EngineContext(
            training_settings(config, mesh),
            mesh,
            optimizer,
            lr_scheduler,
            randomness,
            activations,
            Saver(mesh.aside),
            loaders,
        )
        self._now: Training | State = Training(self.module, made, built, called, alike, context, first)
        give_to(self, self.module)
        if lr_scheduler is not None:
            same_scheduler(mesh.aside(), self._now.options.state_dict())
        if weights is not None:
            self._now.load(weights, strict=False, weights_only=True)
        self._unfinished = False  # the last train_step, which ended in an error
        self._comparison = BatchComparison(mesh)
        go_on_from(outside, mesh.device)  # the script draws what it would have drawn

    @property
    def state(self) -> State:
        """How far training has come: step, samples, tokens, lr, loss_scale."""
        return self._now if isinstance(self._now, State) else self._now.step.state

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
        self._look_at_mode()
        self._training.tell_failed()
        training = self._looked()
        step, passes = training.step, training.passes
        cut = micro_batches(batch, training.context.settings.batches.now, first=not self.state.step)
        self._refuse_within_step("train_step")
        self._comparison.compare(batch)
        self._comparison.warn()
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
                        continue  # a stage's last backward begins it; all of them end it at once
                    case "U":
                        leave()  # what the user is called with here is the same on all ranks
                        step.reduce()
                        result = self._update()
        self._unfinished = False
        return result

    @collective
    @with_gradients
    def eval_step(self, batch: Any) -> EvalResult:
        """The mean loss over a global batch of any size, of which `batch` is this rank's share, or a list of
        its parts; nothing is updated.

        The modules are in evaluation mode meanwhile."""
        return self._looked().passes.evaluate(self.module, batch)

    @collective
    @with_gradients
    def eval_outputs(self, batch: Any, function: Callable[[Any, Any], Any]) -> list[Any]:
        """`function(output, micro-batch)` for each micro-batch of `batch`, which is as in `eval_step`, where
        the last pipeline stage is; an empty list on other ranks. No gradients, and the modules are in
        evaluation mode meanwhile. All ranks must call."""
        return self._looked().passes.outputs(self.module, batch, function)

    # ---- the loop people already have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch (its floating-point inputs cast to the compute dtype,
        `labels` not)."""
        if self.mesh.pp.size > 1:
            raise BatchError(_CUT)
        training = self._looked()
        training.passes.enter(0, 0)
        # the batch is on the host still
        batch = kwargs or (args[0] if len(args) == 1 and not isinstance(args[0], list) else args)
        self._comparison.compare(batch)
        args, kwargs = cast_floating((args, kwargs), None, self.mesh.device)  # type: ignore[misc]
        kind: Kind = "forward" if torch.is_grad_enabled() else "look"
        drawing = training.context.randomness.inside(self.state.step, kind)
        with training.passes.autocast(), training.loop.inside(batch) as forward, drawing:
            output = training.objective.call(args, kwargs)
        # the loss is the caller's, who may compute it outside
        if self.config.precision.compute in AUTOCAST:
            output = training.objective.cast(output)
        training.loop.forward(forward, output)
        return output

    @collective
    @with_gradients
    def backward(
        self, loss: Tensor, weight: float | None = None, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        """Backward of one micro-batch's mean loss; call it batch.size / (dp x micro) times a step.

        weight: what the loss is the mean of; by default the labels of the last micro-batch, or its samples.
        last: whether no other loss of the same micro-batch follows, to be added to this one. retain_graph:
        keep the graph for it."""
        self._refuse_frozen()
        self._training.loop.backward(loss, weight, last, retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss of a micro-batch times the loss scale of fp16 (1 otherwise), for a `backward()` of the
        caller's own, which comes next: `engine.scale(loss).backward()`."""
        return self._step.scale(loss)

    def set_boundary(self, is_last: bool, extend: bool = False, own: float = 1.0) -> None:
        """Say whether the coming backward is the last of its step, and so those after it until this is called
        again: from now on the caller decides how many micro-batches a step has, and not batch.size. All
        ranks say the same. extend: whether one before `step` all the same is added, by another reduction, and
        not an error. own: the factor on losses whose `backward()` the caller begins, with batch.mean =
        "ranks". Raises BatchError on stages of a pipeline, which know it before, and for several
        micro-batches where batch.size makes one and gradients are in files."""
        self._step.set_boundary(is_last, extend, own)

    @collective
    @with_gradients
    def step(self, last: bool = False) -> StepResult:
        """The optimizer step that ends a loop of forward and backward calls. Raises OrderError before the
        last of them.

        last: the data ends here, so there may have been fewer; the step is that of what there was. Every rank
        has had the same number."""
        self._complete("step", last)
        return self._update()

    @with_gradients
    def gradients(self, last: bool = False) -> Gradients:
        """What `step` will apply, to read and to clip, after the last backward of a step. All ranks call.
        last: see `step`."""
        self._complete("gradients", last)
        return Gradients(self._training.placement, self.mesh, self._step)

    def numbers(self, parameter: nn.Parameter) -> ParameterNumbers:
        """The master, the gradient and the optimizer states of one parameter, to be read and written: whole,
        or what this rank has of them. Raises ModelError for a parameter that is not this engine's."""
        return ParameterNumbers(parameter, lambda: self._training, partial(self._complete, "numbers"))

    def _complete(self, call: str, last: bool = False) -> None:
        """End the backward calls of a step. Raises OrderError where that is too early for `call`."""
        self._refuse_frozen()
        self._step.complete(call, last)
        self._training.tell_failed()
        self._comparison.warn()
        self._looked().step.reduce()

    # ---- around training

    @property
    def optimizer(self) -> OptimizerView:
        """The optimizer as a loop or a scheduler of the user's sees it: `param_groups`, whose options count
        at the next step, `state`, `step` and `zero_grad`."""
        return self._training.context.shown.view(self)

    @with_gradients
    def plateau(self, metric: float) -> float:
        """Step the `lr_scheduler`, a ReduceLROnPlateau, by a metric such as a validation loss, and return the
        new learning rate.

        The mean of what the ranks give counts, so that all change their rate together. All ranks must call.
        Raises ConfigError where the scheduler waits for no metric."""
        return self._step.plateau(float(metric))

    def ask_to_stop(self) -> None:
        """Have every rank hear, in the `StepResult.stop` of the step that is being done or of the next one,
        that this rank has to stop.

        For signal handlers: it communicates nothing itself. What to do is the caller's: to save, and to leave
        the loop."""
        if isinstance(self._now, Training):
            self._now.step.flags.stop = True

    def loader(self, dataset: Any, **options: Any) -> Loader:
        """Batches of `dataset` for this rank: shuffled by the config's seed, the same global batches at any
        number of ranks. Options are those of `polyreme.data.Loader`. Of those without an end (`epochs`),
        checkpoints keep the place."""
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
        """Write a checkpoint: a Hugging Face directory, with all that `load` goes on from. All ranks must
        call, and each writes its part.

        tokenizer: its files are written, too. extra: of the caller's, what JSON can hold; `load` returns it.
        wait: return when it is there; without, it is copied to host memory and written while training goes
        on, and an error comes with a later step or call.
        adapters_only: of a PEFT model, its adapters and their optimizer states, without the base. Raises
        CheckpointError on every rank; what was at the path before is then still there. ModelError where more
        than adapters trains."""
        self._looked()
        self._take_in_writes()
        self._training.save(Path(path), tokenizer, extra or {}, wait, adapters_only)
        return Path(path)

    @collective
    @with_gradients
    def load(self, path: str | Path, *, strict: bool = True, weights_only: bool = False) -> Loaded:
        """Go on from a checkpoint of any layout, or from the newest complete one in a run's folder; or take
        the weights of any Hugging Face directory. All ranks must call.

        strict: the checkpoint has all tensors of the model, and no others. weights_only: leave optimizer
        states, random numbers and the place in the data aside. Raises CheckpointError on every rank where
        that cannot be; nothing has changed then."""
        self._refuse_within_step("load")
        self._looked()
        self.wait()
        self._take_in_writes()
        found = self._training.load(Path(path), strict, weights_only)
        self._unfinished = False
        return found

    def wait(self) -> None:
        """Return when the checkpoint that is being written in the background is there. Raises CheckpointError
        where it failed."""
        self._training.saver.wait()

    @with_gradients
    def refresh(self) -> None:
        """Take in what a script did to the module since `initialize`: parameters unfrozen, added, replaced or
        removed, modules too, and `engine.module` itself (`engine.module = peft.get_peft_model(engine.module,
        ...)`). Every rank must have done the same, and call, between two steps. What stays keeps its weights
        and optimizer states; what is new begins with rank 0's numbers, and what is frozen now loses its
        states. The optimizer's groups are made as at first.

        Raises ModelError where that cannot be (see docs/engine.md); nothing has changed then."""
        self._refuse_within_step("refresh")
        self._training.sleep.refuse()
        self.wait()
        self._take_in_writes()
        for axis in (self.mesh.loss, self.mesh.tp):
            same_model(axis, self.module, {})
        old, unchanged = self._training, self._training.placement.unchanged
        refuse_own_shapes([*old.updates])
        settings = placement_settings(self.config, self.mesh.device)
        division = divide_again(self.module, old.roster, old.placement.division, settings, self.mesh)
        made = old.recipe_of(self.module)
        called, alike = old.objective.of(self.module), self._normalised()
        old.release()
        blocks = huggingface.find_blocks(self.module)
        placement = share_out(self.module, blocks, made, division, settings, self.mesh, unchanged)
        built = Built(placement, {0: Whole()}, blocks)
        self._now = Training(self.module, made, built, called, alike, old.context)
        give_to(self, self.module)
        self._now.carry_from(old, unchanged)
        self._trains = any(p.requires_grad for p in self.module.parameters())
        if self.mesh.tp.size == 1:
            self._parameter_count = sum(p.numel() for p in self.module.parameters())

    @contextmanager
    def full_parameters(
        self, write: bool = False, among: Iterable[nn.Parameter] | None = None, rank: int = 0
    ) -> Iterator[nn.Module]:
        """The module with all parameters whole, in memory of their own, so that its `state_dict()` may be
        kept. Every rank must enter.

        write: what the parameters are at the end reaches weights and masters of every rank, unless the block
        ends in an error; of what several ranks have, those of `rank` count. In bf16 a master keeps its digits
        where the parameter did not change. among: these, and others of their buckets, are enough. Raises
        ModelError where parameters were changed without `write`, and OrderError for writing in the middle of
        a step."""
        if self._training.blocks.in_forward:
            raise ModelError(_IN_FORWARD)
        if torch.is_grad_enabled() and self._training.blocks.awaits_backward:
            raise ModelError(_BEFORE_BACKWARD)
        with current().of(Watch).calling("full_parameters"):
            self._take_in_writes()
        names = None if among is None else {*map(name_of, among)}
        if not write:
            with readable(self._training.placement, names):
                yield self.module
            return
        self._refuse_within_step("full_parameters(write=True)")
        with writable(self._training.placement, names, self.mesh.places(rank)):
            yield self.module
            self._training.saver.taken()
        self._step.written.note()

    def _take_in_writes(self) -> None:
        """Have what the user wrote to parameters between steps count. All ranks must call."""
        if not self._step.order.microbatches:
            self._step.written.settle(self._training.saver.taken)

    @with_gradients
    def sleep(
        self, *kinds: Numbers, pin: bool = True, since: str = "engine.sleep(): call engine.wake()"
    ) -> None:
        """Free the device of this engine between two steps, until `wake`: "params", "masters" (of parameters
        in 16 bits), "states" and "gradients" (whose buffers are let go of), or all where none is named, go to
        host memory, pinned unless `pin` is false. What is on the host or in files already stays there. All
        ranks must call.

        What needs what is away raises ModelError, which names `since`: without states and masters, forwards,
        backwards and `full_parameters()` to read work still. Raises OrderError in the middle of a step."""
        self._refuse_within_step("sleep")
        self.wait()
        self._take_in_writes()
        self._training.sleep.sleep(kinds or KINDS, pin, since)

    @with_gradients
    def wake(self) -> tuple[Numbers, ...]:
        """Have all that `sleep` took away where it was. Returns what that is, which may be none."""
        kinds = self._training.sleep.wake()
        if "params" in kinds:  # which are in other memory
            self._step.written.note()
        return kinds

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by category: parameters, gradients, states and buffers that are alive now, and
        activations, which is what the first micro-batch kept for its backward (0 before it, and for compiled
        blocks): on the device, and what `memory` has elsewhere in "parameters_host", "activations_files" and
        so on."""
        return report.memory(self._training)

    def working_set(self) -> dict[str, int]:
        """The most bytes of memory that a step takes on this rank, by category, once one was trained: what
        `memory` counts, and what comes and goes within a step. Without what the model's operators take for a
        moment, the buffers, and freed memory that the C library keeps."""
        return report.working_set(self._training, self.config.zero.prefetch)

    def tiers(self) -> dict[str, dict[str, float]]:
        """What is not in the device's memory, for `states`, `params` and activations: `bytes` held there,
        `memory` (bytes of host memory taken for it), and since the start bytes `read` from it and
        `written` to it, and seconds `waited`."""
        return report.tiers(self._training)

    def close(self, gather: bool = False) -> None:
        """Wait for a checkpoint that is being written, and undo all that the engine did to the process and to
        the model: hooks, forwards, threads, folders of `memory`. `with initialize(...) as engine:` does so at
        its end, and a process that ends, too.

        At stages 0 to 2 on the device, without tp and pp, the model is an ordinary one again, with the
        weights trained, and may be given to another engine. Otherwise this rank has a part of it, and what
        asks for its numbers raises ModelError. The engine cannot be used any more, but for `state`. Raises
        CheckpointError where the checkpoint failed, once all is undone.

        gather: have what ZeRO divides whole first, at stage 3 and from other memory too. All ranks must call
        then."""
        if isinstance(self._now, State):
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

    # ---- parts

    def _refuse_frozen(self) -> None:
        if not self._trains:
            raise ModelError(_FROZEN)

    @property
    def _training(self) -> Training:  # type: ignore[override]
        """What trains the model now."""
        if isinstance(self._now, State):
            raise ModelError(_CLOSED)
        return self._now

    def _looked(self) -> Training:
        """What trains the model, which has what a script changed of its optimizer's groups."""
        self._training.look(self.module, self.refresh)
        return self._training

    @property
    def _step(self) -> Step:
        return self._training.step

    def _normalised(self) -> set[Tensor]:
        """Have batch norms go by the config; the buffers that are alike on all ranks then."""
        dtype = master_dtype(DTYPES[self.config.precision.compute])
        return normalise(self.module, self.mesh.loss, self.config.batch_norm == "sync", dtype, self.patches)

    def _update(self) -> StepResult:
        """The end of a step, once what is being saved was copied."""
        if self.on_gradients is not None:
            self.on_gradients(Gradients(self._training.placement, self.mesh, self._step))
        self._training.saver.taken()
        return self._step.update()


for _name in ("__init__", "__call__", "train_step", "eval_step", "eval_outputs", "backward", "step"):
    setattr(Engine, _name, tells_of_memory(getattr(Engine, _name)))

for _name in ("gradients", "plateau", "refresh", "sleep"):
    setattr(Engine, _name, collective(getattr(Engine, _name)))
for _name in ("train_step", "eval_step", "eval_outputs"):
    setattr(Engine, _name, one_batch(getattr(Engine, _name)))

_CUT = "engine(...) calls the whole model, which is cut into pipeline stages: use train_step and eval_step"
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


def _refuse_closed(module: nn.Module, *_: object) -> None:
    raise ModelError(
        f"{type(module).__name__} was called, of which this rank has a part (mesh.tp > 1), and its engine "
        "is closed: build the model anew, and load what engine.save wrote"
    )
