"""initialize() and Engine: puts the mechanisms together. Reads like a table of contents; the work is done in
the modules it names.

A step is a table (`pipeline.schedule`) executed by `pipeline.run`: forward and backward of every micro-batch,
reduce, update. A model is divided in this order: over pipeline stages, over tensor parallelism, and what is
left of it over data parallelism, by ZeRO."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from polyreme.checkpoint.save import Saver
from polyreme.config import Config
from polyreme.data import Loader
from polyreme.distributed.agreement import known_as, same_config, same_model, same_scheduler
from polyreme.distributed.mesh import Axis, Mesh, everyone
from polyreme.distributed.watch import collective
from polyreme.errors import BatchError, ModelError, NumericsError
from polyreme.models import huggingface
from polyreme.models.batch_norm import normalise
from polyreme.models.buffers import Buffers
from polyreme.offload.activations import ActivationOffload
from polyreme.offload.host_allocator import give_freed_memory_back, keep_freed_memory
from polyreme.optim.groups import Make, Options, Recipe, recipe
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.optim.sparse_rows import look_up_by_rows
from polyreme.pipeline import weight_gradients
from polyreme.pipeline.executor import Calls, Runner, whole
from polyreme.pipeline.schedule import Action, build, check, halves, next_backwards, stage_ranks
from polyreme.pipeline.stage import Stage, refuse_calls
from polyreme.planner.memory_model import working_set
from polyreme.step.batches import MicroBatch, digest, filled, micro_batches, parts_of, warn_of_equal
from polyreme.step.build import (
    Model,
    cut,
    divide,
    divide_again,
    make_numbers,
    open_model,
    share_out,
    take_from_rank_0,
)
from polyreme.step.engine_state import EngineParts, Loaded, adapters, adapters_alone, content, restore
from polyreme.step.gradients import Gradients
from polyreme.step.loss import LossFn, Objective
from polyreme.step.precision import (
    DTYPES,
    GRADIENT,
    MODEL,
    autocast,
    cast_floating,
    loss_scale,
    master_dtype,
    watch_nonfinite,
)
from polyreme.step.recomputation import Saved, measure, wrap_blocks
from polyreme.step.step import State, Step, StepResult
from polyreme.step.user_loop import Loop
from polyreme.tensor.layers import put_off_weights
from polyreme.zero.bucket_memory import live
from polyreme.zero.changes import Roster
from polyreme.zero.full_parameters import Written, lent, lent_to_write
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import give_to, refuse_owned
from polyreme.zero.reduce import Reducer
from polyreme.zero.refresh import carry, refuse_own_shapes
from polyreme.zero.sharded_optimizer import Update


@dataclass(frozen=True)
class EvalResult:
    """Mean loss over the global batch, and the weight (labels, or samples) that it is the mean of."""

    loss: float
    weight: float


def initialize(
    model: Model,
    config: str | Path | Mapping[str, Any] | Config,
    *,
    optimizer: type[Optimizer] | Make | None = None,
    lr_scheduler: Any = None,
    loss_fn: LossFn | None = None,
) -> Engine:
    """Make `model` ready to train as `config` says, on all ranks of the process group (or of the environment;
    or this one process).

    model: a module (rank 0's weights count), a function without arguments that builds one (then never built
        whole: its own initialisation is replayed tensor by tensor, with the config's seed), a sequence of
        layers or of such functions, one for each layer, to be called one after the other, or a Hugging Face
        model directory.
    config: a file, a mapping, or a Config.
    optimizer: a torch.optim class (lr, weight decay, groups and options from the config), a factory such as
        `lambda params: torch.optim.AdamW(params, lr=3e-4)` (which decides all that itself), or None: the
        config's.
    lr_scheduler: a torch scheduler, or a function of an optimizer that returns one: followed in place of the
        config's schedule, and stepped after every step.
    loss_fn: see `polyreme.step.loss.LossFn`; None: the model returns its loss.

    Raises ConfigError with every problem of the config, and ModelError for a model that cannot be trained.
    """
    ranks = everyone()
    given = config
    config = same_config(ranks, lambda: Config.load(given).resolve(ranks.size))
    mesh = Mesh.open(
        {name: getattr(config.mesh, name) for name in ("dp", "tp", "pp", "cp", "ep")},
        config.mesh.order,
        shared_memory=config.mesh.shared_memory,
    )
    return Engine(model, config, mesh, optimizer, lr_scheduler, loss_fn)


class Engine:
    """A model under training. Made by `initialize`.

    `module` is the user's model (its parameters live in buckets now), `config` the resolved config, `mesh`
    the axes."""

    def __init__(
        self,
        model: Model,
        config: Config,
        mesh: Mesh,
        optimizer: type[Optimizer] | Make | None = None,
        lr_scheduler: Any = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        self.config, self.mesh = config, mesh
        if mesh.device.type == "cpu":
            (keep_freed_memory if config.memory.all_on_device else give_freed_memory_back)()
        self._dtype = DTYPES[config.precision.compute]
        if isinstance(model, nn.Module):
            refuse_owned(model)
        self.module, recording, weights = open_model(model, config, mesh)
        blocks = huggingface.find_blocks(self.module)
        made = recipe(self.module, config.optimizer, optimizer)
        others = {
            "built here": recording is not None,
            "weights": weights is not None,
            "optimizer": made.groups,
            "blocks": list(blocks),
        }
        others |= {f"optimizer's group of {name}": group for name, group in made.group_of.items()}
        same_model(
            mesh.aside(),
            self.module,
            {**others, "lr_scheduler": known_as(lr_scheduler), "loss_fn": known_as(loss_fn)},
        )
        self.parameters = sum(p.numel() for p in self.module.parameters())
        """Distinct parameters of the whole model."""
        self.on_gradients: Callable[[Gradients], object] | None = None
        """Called before each update, of `train_step` too, on all ranks: to log norms, or to clip."""
        self._trains = any(p.requires_grad for p in self.module.parameters())
        name = config.schedule if mesh.pp.size > 1 else "1f1b"
        rank_of = stage_ranks(name, mesh.pp.size, config.pipeline.virtual)
        mine = [stage for stage, rank in enumerate(rank_of) if rank == mesh.pp.rank]
        schedule = build(name, mesh.pp.size, config.accumulation, config.pipeline.virtual)
        check(schedule, config.accumulation)
        split = cut(self.module, recording, len(rank_of), config, mesh)
        if recording is None:
            # over dp they are shared out, by ZeRO
            take_from_rank_0(self.module.parameters(), mesh.device, mesh.product("tp", "pp"))
            take_from_rank_0(self.module.buffers(), mesh.device, mesh.product("dp", "tp", "pp"))
        division = divide(self.module, split, rank_of, config, mesh)
        if split is not None:
            blocks = split.blocks_of(self.module, mine)
        self._halved = halves([schedule[mesh.pp.rank]])
        if self._halved:
            put_off_weights(self.module)
        self._mine, self._given = mine, (optimizer, lr_scheduler)
        self._placement = share_out(self.module, blocks, made, division, config, mesh)
        if recording is not None:
            make_numbers(self.module, recording, self._placement, mesh, parameters=weights is None)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(mesh.device).contiguous()
        alike = self._normalised()
        memory = config.memory
        self._offload: ActivationOffload | None = None
        if memory.activations not in ("keep", "recompute"):
            folder = None if memory.activations == "host" else Path(str(memory.activations))
            self._offload = ActivationOffload(mesh.device, folder)
        self._repeated: dict[str, nn.Module] | None = None
        self._recomputed: list[nn.Module] = []
        self._wrap(blocks)
        # a model of several dtypes converts between them itself
        wanted = self._dtype if {*made.kept.values()} <= {self._dtype} else None
        self._cast: Callable[[Any], Any] = lambda inputs: cast_floating(inputs, wanted)
        self._objective = Objective(
            self.module, loss_fn, self._cast, is_split=config.accumulation * mesh.dp.size > 1
        )
        self._row = schedule[mesh.pp.rank]
        self._coming = next_backwards(self._row)
        one = build(name, mesh.pp.size, 1, config.pipeline.virtual)
        self._forward_row = [action for action in one[mesh.pp.rank] if action.op in ("F", "SA", "RA")]
        stages = {stage: Stage(self.module, split, stage) for stage in mine} if split else {}
        if split:
            refuse_calls(self.module, split, stages.values())
        self._runner = Runner(rank_of, mesh.pp, mesh.device, stages or {0: whole})
        self._has_loss = len(rank_of) - 1 in mine
        self._tells = mesh.tp.rank == 0 and self._has_loss
        self._buffers = Buffers(self.module, mesh.dp, alike, config.batch_norm == "rank")
        self._follow(made)
        if lr_scheduler is not None:
            same_scheduler(mesh.aside(), self._options.state_dict())
        self._saver: Saver | None = None
        self._all: Axis | None = None
        if weights is not None:
            restore(self._parts, weights, strict=False, weights_only=True, axis=self._aside())
            self._buffers.take_note()
            self._step.written.note()
        self._activations: Saved | None = Saved() if config.compile else None  # None before they are measured
        self._saved = Saved()  # so far
        self._unfinished = False  # the last train_step, which ended in an error
        self._compared = self._told_equal = (
            False  # a batch, with those of ranks that have to have the same, or another one
        )
        self._digest: str | None = None  # of the first batch
        # dropout differs between ranks, but not over tp
        torch.manual_seed(config.seed + mesh.dp.rank + mesh.dp.size * mesh.pp.rank)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "an engine is spread over its ranks, and cannot be pickled or "
            "copied: engine.save(path) keeps all of it, engine.state_dict() "
            "has its weights, and copy.deepcopy(engine.module) inside "
            "of `with engine.full_parameters():` is a plain model"
        )

    @property
    def state(self) -> State:
        """How far training has come: step, samples, tokens, lr, loss_scale."""
        return self._step.state

    # ---- one optimizer step

    @collective
    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this data-parallel rank's share of one global batch.

        batch: mapping, tuple or tensor whose tensors have the leading dimension batch.size / dp (micro-batch
        x accumulation), or after the first step less, even 0; or a list of micro-batches, passed on as they
        are. Raises BatchError for a batch of another size, or where ranks of a tp or pp line have different
        ones in the first step; and NumericsError for NaN or Inf outside fp16 (unless precision.on_nonfinite =
        "skip")."""
        self._refuse_frozen()
        self._tell_unsaved()
        self._roster.check(self.module)
        parts = micro_batches(batch, self.config, first=not self.state.step)
        if self._step.microbatches:
            raise BatchError(
                "train_step in the middle of a step: call step() after the backward() calls before it"
            )
        self._compare(batch)
        self._tell_equal()
        if self._unfinished:
            self._step.begin()
        self._unfinished = True
        random_state = self._random_state()
        # on a device, it would wait for it
        weights = [self._objective.visible_weight(part.batch) if part.samples else 0 for part in parts]
        parts = [
            replace(part, tokens=part.samples and huggingface.count_tokens(part.batch)) for part in parts
        ]
        parts = [replace(part, batch=cast_floating(part.batch, None, self.mesh.device)) for part in parts]
        try:
            results = self._run(parts, weights)
        except NumericsError as error:
            raise NumericsError(f"{error}{self._diagnose(parts, weights, random_state)}") from None
        self._unfinished = False
        return results[0]

    @collective
    def eval_step(self, batch: Any) -> EvalResult:
        """The mean loss over a global batch of any size, of which `batch` is this rank's share, or a list of
        its parts; nothing is updated.

        The modules are in evaluation mode meanwhile."""
        self._roster.check(self.module)
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        parts = parts_of(batch, self.config)
        counts: list[Any] = self.mesh.dp.gather_objects(len(parts))
        parts = filled(parts, max(counts))

        def evaluate(part: MicroBatch) -> None:
            moved = cast_floating(part.batch, None, self.mesh.device)

            def loss(i: int, output: Any) -> None:
                loss_sum, weight = self._objective.loss(output, moved, None if part.samples else 0)
                totals.add_(torch.stack([loss_sum.double(), totals.new_tensor(weight)]))

            calls = Calls(self._blocks.at, lambda i: self._objective.output(moved), loss)
            self._runner.run(self._forward_row, calls, [_shape(moved)])

        try:
            with torch.no_grad(), self._autocast():
                for part in parts:
                    evaluate(part)
        finally:
            for module, mode in modes.items():
                module.training = mode
        totals *= self._tells
        self.mesh.product("dp", "tp", "pp").all_reduce(totals)
        loss_sum, total = totals.tolist()
        return EvalResult(loss_sum / total if total else math.nan, total)

    # ---- the loop people already have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch (its floating-point inputs cast to the compute dtype,
        `labels` not)."""
        if self.mesh.pp.size > 1:
            raise BatchError(
                "engine(...) calls the whole model, which is cut "
                "into pipeline stages: use train_step and eval_step"
            )
        self._roster.check(self.module)
        self._enter(0, 0)
        # on the host still
        batch = kwargs or (args[0] if len(args) == 1 and not isinstance(args[0], list) else args)
        self._compare(batch)
        args, kwargs = cast_floating((args, kwargs), None, self.mesh.device)  # type: ignore[misc]
        with self._autocast():
            output = self.module(
                *self._cast(args), **{**self._objective.fixed, **self._objective.cast_keywords(kwargs)}
            )
        # the loss is the caller's, who may compute it outside
        if self.config.precision.compute == "autocast-bf16":
            output = self._cast(output)
        self._loop.forward(batch, output)
        return output

    @collective
    def backward(self, loss: Tensor, weight: float | None = None, *, last: bool = True) -> None:
        """Backward of one micro-batch's mean loss; call it batch.size / (dp x micro) times a step.

        weight: what the loss is the mean of; by default the labels of the last micro-batch, or its samples.
        last: whether no other loss of the same micro-batch follows, to be added to this one."""
        self._refuse_frozen()
        self._loop.backward(loss, weight, last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step. Not needed after `step`, which does so."""
        self._step.clear()

    @collective
    def step(self, last: bool = False) -> StepResult:
        """The optimizer step that ends a loop of forward and backward calls. Raises BatchError before the
        last of them.

        last: the data ends here, so there may have been fewer; the step is that of what there was. Every rank
        has had the same number."""
        self._complete("step", last)
        return self._update()

    def gradients(self, last: bool = False) -> Gradients:
        """After the last backward of a step: what `step` is to apply, to be read and clipped. All ranks call.
        last: see `step`."""
        self._complete("gradients", last)
        return Gradients(self._placement, self.mesh, self._step)

    def _complete(self, call: str, last: bool) -> None:
        """End the backward calls of a step. Raises BatchError where that is too early for `call`."""
        self._refuse_frozen()
        done, count = self._step.microbatches, self.config.accumulation
        if done != count and not (last and done):
            raise BatchError(
                f"{call}() after {done} backward() calls, but batch.size = "
                f"{self.config.batch.size} over {self.mesh.dp.size} ranks with "
                f"batch.micro = {self.config.batch.micro} makes {count} a step"
                + (f": call {call}(last=True) where the data ends before" if done else "")
            )
        self._step.skip_the_rest()
        self._tell_unsaved()
        self._tell_equal()
        self._roster.check(self.module)
        self._step.reduce()

    # ---- around training

    def plateau(self, metric: float) -> float:
        """Step the `lr_scheduler`, a ReduceLROnPlateau, by a metric such as a validation loss, and return the
        new learning rate.

        The mean of what the ranks give counts, so that all change their rate together. All ranks must call.
        Raises ConfigError where the scheduler waits for no metric."""
        return self._step.plateau(float(metric))

    def ask_to_stop(self) -> None:
        """Have every rank hear, in the `StepResult.stop` of the step that is being done or of the next one,
        that this rank is to stop.

        For signal handlers: it communicates nothing itself. What to do is the caller's: to save, and to leave
        the loop."""
        self._step.stop = True

    def loader(self, dataset: Any, **options: Any) -> Loader:
        """Batches of `dataset` for this rank: shuffled by the config's seed, the same global batches at any
        number of ranks. Options are those of `polyreme.data.Loader`. Of those without an end (`epochs`),
        checkpoints keep the place."""
        dp = self.mesh.dp
        defaults = {
            "batch_size": self.config.batch.size,
            "seed": self.config.seed,
            "shuffle": self.config.data.shuffle,
            "pin": self.mesh.device.type == "cuda",
        }
        made = Loader(dataset, rank=dp.rank, world=dp.size, **{**defaults, **options})
        if made.epochs is None:
            if self._parts.positions:
                made.load_state_dict(self._parts.positions.pop(0))
            self._parts.loaders.append(made)
        return made

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
        self._roster.check(self.module)
        self._take_in_writes()
        only = adapters_alone(self._parts) if adapters_only else None
        if self._saver is None:
            self._saver = Saver(self._aside())
        whole = adapters(self._parts)
        self._saver.save(
            Path(path), lambda: content(self._parts, tokenizer, extra or {}, whole, only), background=not wait
        )
        return Path(path)

    @collective
    def load(self, path: str | Path, *, strict: bool = True, weights_only: bool = False) -> Loaded:
        """Go on from a checkpoint of any layout, or from the newest complete one in a run's folder; or take
        the weights of any Hugging Face directory. All ranks must call.

        strict: the checkpoint has all tensors of the model, and no others. weights_only: leave optimizer
        states, random numbers and the place in the data aside. Raises CheckpointError on every rank where
        that cannot be; nothing has changed then."""
        if self._step.microbatches:
            raise BatchError("load in the middle of a step: call step() after the backward() calls before it")
        self._roster.check(self.module)
        if self._saver is not None:
            self._saver.wait()
        self._take_in_writes()
        found = restore(self._parts, Path(path), strict, weights_only, self._aside())
        self._buffers.take_note()
        self._unfinished = False
        self._step.written.note()
        return found

    def wait(self) -> None:
        """Return when the checkpoint that is being written in the background is there. Raises CheckpointError
        where it failed."""
        if self._saver is not None:
            self._saver.wait()

    @collective
    def state_dict(self, rank0_only: bool = False, master: bool = False) -> dict[str, Tensor]:
        """Whole tensors under the model's own names, tied ones under each of theirs; buffers too. Every rank
        must call.

        In the compute dtype, or with `master` the optimizer's full-precision copy. With `rank0_only` others
        get {}."""
        self._take_in_writes()
        found: dict[str, Tensor] = {}
        for names, tensor in self._tensors(master):
            if self.mesh.rank == 0 or not rank0_only:
                found |= dict.fromkeys(names, tensor.detach().clone())
        return found

    def refresh(self) -> None:
        """Take in what a script did to the module since `initialize`: parameters unfrozen, added, replaced or
        removed, modules too, and `engine.module` itself (`engine.module = peft.get_peft_model(engine.module,
        ...)`). Every rank must have done the same, and call, between two steps. What stays keeps its weights
        and optimizer states; what is new begins with rank 0's numbers, and what is frozen now loses its
        states. The optimizer's groups are made as at first.

        Raises ModelError where that cannot be (see docs/engine.md); nothing has changed then."""
        if self._step.microbatches:
            raise BatchError(
                "refresh in the middle of a step: call step() after the backward() calls before it"
            )
        self.wait()
        self._take_in_writes()
        for axis in (self.mesh.dp, self.mesh.tp):
            same_model(axis, self.module, {})
        refuse_own_shapes(self._updates)
        division = divide_again(self.module, self._roster, self._placement, self.config, self.mesh)
        made = recipe(self.module, self.config.optimizer, self._given[0])
        self._options.check(made)
        self._objective.follow(self.module)
        self._buffers = Buffers(
            self.module, self.mesh.dp, self._normalised(), self.config.batch_norm == "rank"
        )
        old, updates, step, parts = self._placement, self._updates, self._step, self._parts
        kept = old.kept
        for each in (self._blocks, self._reducer, self._loop):
            each.close()
        self._at_end.detach()  # it holds the loop, and so all that is replaced
        blocks = huggingface.find_blocks(self.module)
        self._wrap(blocks)
        self._placement = share_out(self.module, blocks, made, division, self.config, self.mesh, kept)
        self._follow(made)
        carry(old, updates, self._placement, self._updates, kept)
        self._step.load_state_dict(step.state_dict())
        self._step.written.note()
        self._step.stop = step.stop
        self._parts.loaders, self._parts.positions = parts.loaders, parts.positions
        old.offload.close()
        self._trains = any(p.requires_grad for p in self.module.parameters())
        self.parameters = (
            sum(p.numel() for p in self.module.parameters()) if self.mesh.tp.size == 1 else self.parameters
        )

    @contextmanager
    def full_parameters(self, write: bool = False) -> Iterator[nn.Module]:
        """The module with all parameters whole, in memory of their own, so that its `state_dict()` may be
        kept. Every rank must enter.

        write: what the parameters are at the end reaches weights and masters of every rank, unless the block
        ends in an error; of what several ranks have, rank 0's count. In bf16 a master keeps its digits where
        the parameter did not change. Raises ModelError where parameters were changed without `write`, and
        BatchError for writing in the middle of a step."""
        if self._blocks.in_forward:
            raise ModelError(
                "full_parameters() inside a forward of the module, from a "
                "hook or its own code: parameters come and go there. Call it "
                "before or after the forward; a forward hook of a "
                "block may read the parameters of that block as they are"
            )
        self._take_in_writes()
        if not write:
            with lent(self._placement):
                yield self.module
            return
        if self._step.microbatches:
            raise BatchError(
                "full_parameters(write=True) in the middle of a "
                "step: call step() after the backward() calls before it"
            )
        with lent_to_write(self._placement):
            yield self.module
            if self._saver is not None:
                self._saver.taken()
        self._step.written.note()

    def _take_in_writes(self) -> None:
        """Between steps: have what the user wrote to parameters count. All ranks must call."""
        if not self._step.microbatches:
            self._step.written.settle(lambda: None if self._saver is None else self._saver.taken())

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by category: parameters, gradients, states and buffers that are alive now, and
        activations, which is what the first micro-batch kept for its backward (0 before it, and for compiled
        blocks): on the device, and if memory.activations says so, in "activations_host" or
        "activations_files"."""
        found = {"parameters": 0, "gradients": self._placement.pool.nbytes(), "states": 0}
        for bucket in self._placement.buckets:
            for category, size in live(bucket).items():
                found[category] += size
        found["states"] += sum(update.nbytes() for update in self._updates)
        kept = self._activations or Saved()
        found["activations"] = kept.bytes
        if self._offload is not None:
            found[f"activations_{self._offload.place}"] = kept.moved
        found["buffers"] = sum(buffer.nbytes for buffer in self.module.buffers())
        return found

    def working_set(self) -> dict[str, int]:
        """The most bytes of memory that a step takes on this rank, by category, once one was trained: what
        `memory` counts, and what comes and goes within a step. Without what the model's operators take for a
        moment, the buffers, and freed memory that the C library keeps."""
        found = working_set(self._placement, self.config.zero.prefetch)
        found["states"] += sum(update.nbytes() for update in self._updates)
        found["activations"] = (self._activations or Saved()).bytes
        return found

    def tiers(self) -> dict[str, dict[str, float]]:
        """Of `states` and `params` that are not in the device's memory, and of activations: `bytes` held
        there, `memory` (bytes of host memory taken for it), and since the start bytes `read` from it and
        `written` to it, and seconds `waited`."""
        found = self._placement.offload.report()
        if (kept := self._offload) is not None:
            held = {"bytes": kept.disk if kept.place == "files" else kept.memory, "memory": kept.memory}
            found["activations"] = {**held, **asdict(kept.traffic)}
        return found

    def close(self) -> None:
        """Give back what the engine has outside of its memory: folders of `memory`. A process that ends does
        so anyway; the engine cannot be used any more."""
        self.wait()
        self._placement.offload.close()

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Since the start, by mesh axis and operation: (calls, bytes sent by this rank)."""
        return self.mesh.traffic()

    # ---- parts

    def _refuse_frozen(self) -> None:
        if not self._trains:
            raise ModelError("every parameter of the model is frozen, so that there "
                             "is nothing to update: set requires_grad on those to "
                             "train before initialize(); to be called or "
                             "evaluated, engine(...) and eval_step are there")  # fmt: skip

    def _normalised(self) -> set[Tensor]:
        return normalise(
            self.module, self.mesh.dp, self.config.batch_norm == "sync", master_dtype(self._dtype)
        )

    def _wrap(self, blocks: dict[str, nn.Module]) -> None:
        """Set the forwards of those of `blocks`, which are all that repeat now, that are new."""
        if self.mesh.device.type == "cpu" and not self.config.compile:
            look_up_by_rows(self.module)
        memory, known = self.config.memory, {id(block) for block in (self._repeated or {}).values()}
        new = {name: block for name, block in blocks.items() if id(block) not in known}
        if new or self._repeated is None:
            self._recomputed += wrap_blocks(
                self.module,
                new,
                memory.activations != "keep",
                memory.recompute_every,
                memory.recompute_save,
                self.config.compile,
                self._offload,
            )
        self._repeated = blocks

    def _follow(self, made: Recipe) -> None:
        """Have what steps, gathers, reduces and updates be of the placement; `made` has its optimizers."""
        config, mesh = self.config, self.mesh
        every_time = self._placement.microbatches == "left" or (
            config.zero.reduce_every == "microbatch" and mesh.dp.size > 1
        )
        self._reducer = Reducer(self._placement.trainable, config.accumulation, every_time, self._mine)
        self._blocks = Blocks(
            self.module,
            self._placement.root,
            self._placement.units,
            config.zero.prefetch,
            config.zero.release,
            self._reducer.complete,
        )
        compact = None if config.optimizer.states == "fp32" else config.optimizer.states
        self._updates = [Update(bucket, made.groups, compact) for bucket in self._placement.trainable]
        self._options = Options(made, LRSchedule(config.lr_schedule), self._given[1])
        self._step = Step(
            config,
            mesh,
            self._tells,
            self._placement.trainable,
            self._reducer,
            self._blocks,
            self._updates,
            self._options,
            loss_scale(config.precision),
            self._placement.offload,
            self._buffers,
            Written(self._placement.buckets, mesh.dp),
        )
        self._parts = EngineParts(self.module, config, mesh, self._placement, self._updates, self._step)
        if self._offload is not None:
            self._offload.leave([*self.module.parameters(), *self.module.buffers()])
        trained = [p for bucket in self._placement.trainable for p in bucket.parameters]
        give_to(self, self.module)
        self._loop = Loop(self.module, self._objective, config, self._step, self._reducer, trained)
        self._at_end = weakref.finalize(self, self._loop.close)
        self._at_end.atexit = False
        self._roster = Roster(self.module)

    def _update(self) -> StepResult:
        """The end of a step, once what is being saved was copied."""
        if self.on_gradients is not None:
            self.on_gradients(Gradients(self._placement, self.mesh, self._step))
        if self._saver is not None:
            self._saver.taken()
        return self._step.update()

    def _aside(self) -> Axis:
        """All ranks, for what may go on beside training, where nothing does now. All must call."""
        Saver.idle()
        if self._all is None:
            self._all = self.mesh.aside()
        return self._all

    def _tell_unsaved(self) -> None:
        """Raise CheckpointError on every rank, before one and the same step, if one being written in the
        background failed."""
        if self._saver is not None:
            if self._step.heard_unsaved:
                self._step.heard_unsaved = False
                self._saver.wait()
            self._step.unsaved = self._saver.failed

    def _compare(self, batch: Any) -> None:
        """The first time, refuse a batch that is not the same on all ranks that compute it together."""
        for axis in () if self._compared else (self.mesh.tp, self.mesh.pp):
            if axis.size > 1 and len({*axis.gather_objects(digest(batch))}) > 1:
                raise BatchError(
                    f"ranks of one {axis.name} line have different batches, "
                    "but compute one together: give each rank the share of its "
                    "place in data parallelism (engine.mesh.dp.rank of "
                    "engine.mesh.dp.size, not of the world), as engine.loader does"
                )
        if not self._compared and self.mesh.dp.size > 1:
            self._digest = digest(batch)
        self._compared = True

    def _tell_equal(self) -> None:
        """In the first step: warn where all data-parallel ranks have the same batch."""
        if not self._told_equal:
            digests: list[Any] = self.mesh.dp.gather_objects(self._digest)
            warn_of_equal(digests)
        self._told_equal = True

    def _run(
        self, parts: Sequence[MicroBatch], weights: Sequence[float | None], update: bool = True
    ) -> list[StepResult]:
        """Perform this rank's row of the schedule on the micro-batches; all but its end without `update`."""
        losses: dict[int, tuple[Tensor, float]] = {}
        results: list[StepResult] = []

        def loss(i: int, output: Any) -> None:
            with self._measured(), self._autocast():
                losses[i] = self._objective.loss(output, parts[i].batch, weights[i])
            if self._activations is None:
                self._activations = self._saved

        def end() -> None:
            self._step.reduce()
            results.append(self._update())

        coming = iter(self._coming)
        calls = Calls(
            enter=lambda stage, i: self._enter(stage, i, next(coming)),
            forward=lambda i: self._output(parts[i].batch),
            loss=loss,
            root=lambda i: self._step.root(*losses.pop(i), parts[i].tokens, parts[i].samples),
            differentiate=self._differentiate,
            update=end if update else None,
        )
        self._runner.run(self._row, calls, [_shape(part.batch) for part in parts])
        return results

    def _enter(self, stage: int, microbatch: int, coming: tuple[int, int] | None = None) -> None:
        """Before a forward or backward for training: which one comes, and whose backward is next."""
        self._blocks.at(stage, microbatch)
        weight_gradients.expect(Action("B", stage, microbatch) in self._halved)
        if self._offload is not None:
            self._offload.at(stage, microbatch, coming)

    def _differentiate(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[], None] | None:
        """The backward that was entered, or its first half."""
        if weight_gradients.expected():
            return self._step.differentiate_inputs(stage, roots, gradients)
        self._step.differentiate(stage, roots, gradients)
        return None

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.config.precision.compute, self.mesh.device)

    def _output(self, batch: Any) -> Any:
        """The model's output for one micro-batch; the first time, also how much memory its activations
        take."""
        with self._measured(), self._autocast():
            output = self._objective.output(batch)
        if self._activations is None and not self._has_loss:
            self._activations = self._saved
        return output

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Count what is saved for backward, until that is known."""
        if self._activations is not None:
            yield
            return
        with measure(self._recomputed, self.module.parameters(), self._offload) as saved:
            yield
        self._saved = Saved(self._saved.bytes + saved.bytes, self._saved.moved + saved.moved)

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        """Of the CPU, and of the GPU where there is one."""
        device = self.mesh.device
        return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def _diagnose(
        self,
        parts: Sequence[MicroBatch],
        weights: Sequence[float | None],
        random_state: tuple[Tensor, Tensor | None],
    ) -> str:
        """Run the step's forwards and backwards again, watched, and tell which module first made a NaN or
        Inf, and on which rank."""
        torch.set_rng_state(random_state[0])
        if random_state[1] is not None:
            torch.cuda.set_rng_state(random_state[1], self.mesh.device)
        self._step.begin()
        with watch_nonfinite(self.module) as found:
            self._run(parts, weights, update=False)
        told = self.mesh.gather_objects((self.mesh.rank, *found[:1]))
        reports = [report for report in told if len(report) > 1]
        # what another stage made spoils the gradients of those before it, and the outputs of those after
        for later in (GRADIENT, MODEL):
            reports = [report for report in reports if later not in report[1]] or reports
        lines = [f"\n  rank {rank}: first made by {what}" for rank, what in sorted(reports)]
        return (
            "".join(lines)
            + '\n  lower the learning rate, check the data, or set precision.on_nonfinite = "skip"'
        )

    def _tensors(self, master: bool = False) -> Iterator[tuple[list[str], Tensor]]:
        """Every parameter and persistent buffer, whole, with all its names, each valid until the next."""
        yield from self._placement.tensors(master)
        yield from self._placement.buffers(self.module)


def _shape(batch: Any) -> Hashable:
    """Of every tensor in a batch."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)
    )
