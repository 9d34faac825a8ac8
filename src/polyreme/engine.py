"""initialize() and Engine: puts the mechanisms together. Reads like a table of contents; the work is done in the modules it names.

A step is a table (`pipeline.schedule`) executed by `pipeline.run`: forward and backward of every micro-batch, reduce, update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polyreme import model_map
from polyreme.activations import measure, wrap_blocks
from polyreme.checkpoint.save import save
from polyreme.config import Config, Progress, Span
from polyreme.data import Loader
from polyreme.errors import BatchError, ConfigError, ModelError, NumericsError, Problem
from polyreme.lr_schedule import LRSchedule
from polyreme.mesh import Mesh, world
from polyreme.objective import LossFn, Objective, leading_size, split
from polyreme.pipeline.run import run
from polyreme.pipeline.schedule import Action, check, single_stage
from polyreme.precision import (
    DTYPES,
    LossScale,
    cast_floating,
    clip_factor,
    master_dtype,
    norm_of,
    squared_norm,
    watch_nonfinite,
)
from polyreme.zero.blocks import Blocks
from polyreme.zero.bucket import Formats
from polyreme.zero.deferred import record
from polyreme.zero.optimizers import Make, Options, recipe
from polyreme.zero.place import Placement, place
from polyreme.zero.reduce import Reducer
from polyreme.zero.residency import Residency
from polyreme.zero.update import Update


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank but for `seconds`."""

    step: int
    loss: float
    """Mean over the whole global batch (over its labels, for language models)."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    loss_scale: float
    skipped: bool
    """Whether an overflow (NaN or Inf in a gradient), or a batch without any label, made this step leave the weights alone."""
    samples: int
    """Of this step, over all ranks; `tokens` too."""
    tokens: int
    seconds: float


@dataclass(frozen=True)
class EvalResult:
    """Mean loss over the global batch, and the weight (labels, or samples) that it is the mean of."""

    loss: float
    weight: float


@dataclass
class State:
    """How far training has come."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    lr: float = 0.0
    loss_scale: float = 1.0

    @property
    def progress(self) -> Progress:
        return Progress(self.step, self.samples, self.tokens)


def initialize(
    model: nn.Module | Callable[[], nn.Module] | str | Path,
    config: str | Path | Mapping[str, Any] | Config,
    *,
    optimizer: type[Optimizer] | Make | None = None,
    lr_scheduler: Any = None,
    loss_fn: LossFn | None = None,
) -> Engine:
    """Make `model` ready to train as `config` says, on all ranks of the process group (or of the environment; or this one process).

    model: a module (rank 0's weights count), a function without arguments that builds one (then never built whole: its own
        initialisation is replayed tensor by tensor, with the config's seed), or a Hugging Face model directory.
    config: a file, a mapping, or a Config.
    optimizer: a torch.optim class (lr, weight decay, groups and options from the config), a factory such as
        `lambda params: torch.optim.AdamW(params, lr=3e-4)` (which decides all that itself), or None: the config's.
    lr_scheduler: a torch scheduler, or a function of an optimizer that returns one: followed in place of the config's schedule, and
        stepped after every step.
    loss_fn: see `polyreme.objective.LossFn`; None: the model returns its loss.

    Raises ConfigError with every problem of the config, and ModelError for a model that cannot be trained.
    """
    world_size, _ = world()
    config = Config.load(config).resolve(world_size)
    mesh = Mesh.open({name: getattr(config.mesh, name) for name in ("dp", "tp", "pp", "cp", "ep")}, config.mesh.order)
    return Engine(model, config, mesh, optimizer, lr_scheduler, loss_fn)


class Engine:
    """A model under training. Made by `initialize`.

    `module` is the user's model (its parameters live in buckets now), `config` the resolved config, `mesh` the axes, `state` how
    far training has come.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str | Path,
        config: Config,
        mesh: Mesh,
        optimizer: type[Optimizer] | Make | None = None,
        lr_scheduler: Any = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        self.config, self.mesh, self.state = config, mesh, State()
        self._dtype = DTYPES[config.precision.compute]
        if isinstance(model, str | Path):
            model = model_map.build(str(model), None, config.model.trust_remote_code)
        recording = None if isinstance(model, nn.Module) else record(model, config.seed)
        self.module: nn.Module = model if isinstance(model, nn.Module) else recording.module  # type: ignore[union-attr]
        blocks = model_map.find_blocks(self.module)
        made = recipe(self.module, config.optimizer, optimizer)
        self._placement = self._place(blocks, made)
        if recording is not None:
            recording.replay(self._write)
        self._finish_buffers()
        memory = config.memory
        self._recomputed = wrap_blocks(blocks, recompute=memory.activations == "recompute", every=memory.recompute_every,
                    keep=memory.recompute_save, compiled=config.compile)  # fmt: skip
        self._reducer = Reducer(self._placement.trainable)
        self._blocks = Blocks(self.module, self._placement.root, self._placement.units, config.zero.prefetch, config.zero.release,
                              self._reducer.complete)  # fmt: skip
        self._updates = [Update(bucket, made.groups) for bucket in self._placement.trainable]
        self._objective = Objective(self.module, loss_fn)
        self._schedule = single_stage(config.accumulation)
        rate = config.lr_schedule
        spans = [rate.warmup] if rate.name == "constant" else [rate.warmup, rate.total, rate.decay]
        in_tokens = any(isinstance(span, Span) and span.amount and span.unit == "tokens" for span in spans)
        self._needs_tokens = in_tokens and lr_scheduler is None
        check(self._schedule, config.accumulation)
        self._options = Options(made, LRSchedule(config.lr_schedule), lr_scheduler)
        fp16 = config.precision.compute == "fp16"
        p = config.precision
        dynamic = fp16 and p.loss_scale == "dynamic"
        first = p.initial_scale if dynamic else p.loss_scale if fp16 and isinstance(p.loss_scale, float) else 1.0
        self._scale = LossScale(first, dynamic, p.growth, p.backoff, p.growth_interval, p.min_scale)
        self.state.loss_scale, self.state.lr = self._scale.value, self._options.lr
        self._activations: int | None = None if not config.compile else 0
        self._last_batch: Any = None
        self._last_output: Any = None
        self._hint = 0.0  # a power of two near the weight of a global batch, by which losses are divided until it is known
        self._begin_step()
        torch.manual_seed(config.seed + mesh.dp.rank)  # dropout differs between ranks

    # ---- one optimizer step

    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this data-parallel rank's share of one global batch.

        batch: mapping, tuple or tensor whose tensors have the leading dimension batch.size / dp (micro-batch x accumulation).
        Raises BatchError for a batch of another size, and NumericsError for NaN or Inf outside fp16 (unless
        precision.on_nonfinite = "skip").
        """
        expected = self.config.batch.size // self.mesh.dp.size
        if (size := leading_size(batch)) != expected:
            raise BatchError(
                f"this rank's share of the batch has {size} samples, but batch.size = {self.config.batch.size} over "
                f"{self.mesh.dp.size} data-parallel ranks makes {expected}: change batch.size, or give each rank {expected}"
            )
        if self._microbatches_done:
            raise BatchError("train_step in the middle of a step: call step() after the backward() calls before it")
        began = time.perf_counter()
        random_state = torch.get_rng_state()
        batches = split(cast_floating(batch, self._dtype, self.mesh.device), self.config.accumulation)
        losses: dict[int, tuple[Tensor, float]] = {}

        def forward(action: Action) -> None:
            if self._activations is not None:
                losses[action.microbatch or 0] = self._objective(batches[action.microbatch or 0])
                return
            with measure(self._recomputed, self.module.parameters()) as saved:
                losses[action.microbatch or 0] = self._objective(batches[action.microbatch or 0])
            self._activations = saved.bytes

        def backward(action: Action) -> None:
            loss, weight = losses.pop(action.microbatch or 0)
            self._backward(loss, weight, model_map.count_tokens(batches[action.microbatch or 0]))

        try:
            run(self._schedule[0], {"F": forward, "B": backward, "R": lambda _: self._reduce(), "U": lambda _: self._update()})
        except NumericsError as error:
            raise NumericsError(f"{error}{self._diagnose(batches, random_state)}") from None
        return self._result(began)

    def eval_step(self, batch: Any) -> EvalResult:
        """The mean loss over a global batch of any size, of which `batch` is this rank's share; nothing is updated.

        The modules are in evaluation mode meanwhile."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            with torch.no_grad():
                loss, weight = self._objective(cast_floating(batch, self._dtype, self.mesh.device))
        finally:
            for module, mode in modes.items():
                module.training = mode
        totals = torch.tensor([float(loss), weight], dtype=torch.float64)
        self._all_reduce(totals)
        return EvalResult(float(totals[0] / totals[1]) if totals[1] else math.nan, float(totals[1]))

    # ---- the loop people already have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch (its floating-point inputs cast to the compute dtype)."""
        args, kwargs = cast_floating((args, kwargs), self._dtype, self.mesh.device)  # type: ignore[misc]
        self._last_batch = kwargs or (args[0] if len(args) == 1 else args)
        self._last_output = self.module(*args, **{**self._objective.fixed, **kwargs})
        return self._last_output

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Backward of one micro-batch's mean loss; call it batch.size / (dp x micro) times a step.

        weight: what the loss is the mean of; by default the labels of the last micro-batch, or its samples."""
        if self._last_batch is None:
            raise BatchError("backward() without a forward: call engine(...) first")
        if weight is None:
            weight = float(self._objective.weight(self._last_batch))
        loss_sum, weight = self._objective.sum_of(loss, weight, self._last_output)
        tokens, self._last_batch, self._last_output = model_map.count_tokens(self._last_batch), None, None
        self._backward(loss_sum, weight, tokens)

    def step(self) -> StepResult:
        """The optimizer step that ends a loop of forward and backward calls. Raises BatchError before the last of them."""
        if self._microbatches_done != self.config.accumulation:
            raise BatchError(
                f"step() after {self._microbatches_done} backward() calls, but batch.size = {self.config.batch.size} over "
                f"{self.mesh.dp.size} ranks with batch.micro = {self.config.batch.micro} makes {self.config.accumulation} a step"
            )
        run(self._schedule[0][-2:], {"R": lambda _: self._reduce(), "U": lambda _: self._update()})
        return self._result(self._began)

    # ---- around training

    @property
    def parameters(self) -> int:
        """Distinct parameters of the whole model."""
        return sum(bucket.layout.used for bucket in self._placement.buckets)

    def loader(self, dataset: Any, **options: Any) -> Loader:
        """Batches of `dataset` for this rank: shuffled by the config's seed, the same global batches at any number of ranks,
        resumable. Options are those of `polyreme.data.Loader`."""
        dp = self.mesh.dp
        defaults = {"batch_size": self.config.batch.size, "seed": self.config.seed, "shuffle": self.config.data.shuffle,
                    "pin": self.mesh.device.type == "cuda"}  # fmt: skip
        return Loader(dataset, rank=dp.rank, world=dp.size, **{**defaults, **options})

    def save(self, path: str | Path, tokenizer: Any = None) -> Path:
        """Write the model as a Hugging Face directory at `path` (rank 0 writes; all ranks call). See `polyreme.checkpoint.save`."""
        return save(self.module, self._tensors(), Path(path), tokenizer, self.mesh.rank == 0, self.mesh.dp)

    def state_dict(self, rank0_only: bool = False, master: bool = False) -> dict[str, Tensor]:
        """Whole tensors under the model's own names, tied ones under each of theirs; buffers too. Every rank must call.

        In the compute dtype, or with `master` the optimizer's full-precision copy. With `rank0_only` others get {}."""
        found: dict[str, Tensor] = {}
        for names, tensor in self._tensors(master):
            if self.mesh.rank == 0 or not rank0_only:
                found |= dict.fromkeys(names, tensor.detach().clone())
        return found

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The module with all parameters whole, to be read and not changed. Every rank must enter."""
        with self._blocks.gathered():
            yield self.module

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by category: parameters, gradients, states and buffers that are alive now, and activations, which is what
        the first micro-batch kept for its backward (0 before it, and for compiled blocks)."""
        found = {"parameters": 0, "gradients": self._placement.pool.nbytes(), "states": 0}
        for bucket in self._placement.buckets:
            for category, size in bucket.nbytes().items():
                found[category] += size
        found["states"] += sum(update.nbytes() for update in self._updates)
        found["activations"] = self._activations or 0
        found["buffers"] = sum(buffer.nbytes for buffer in self.module.buffers())
        return found

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Since the start, by mesh axis and operation: (calls, bytes sent by this rank)."""
        return self.mesh.traffic()

    # ---- the parts of a step

    def _begin_step(self) -> None:
        self._microbatches_done = 0
        self._loss_sum = self._weight = 0.0
        self._tokens = 0
        self._last_batch = self._last_output = None
        self._began = time.perf_counter()
        for bucket in self._placement.trainable:
            bucket.clear_grad()

    def _backward(self, loss_sum: Tensor, weight: float, tokens: int) -> None:
        """Backward of a sum of losses, scaled to about the size of a mean over the global batch."""
        if self._microbatches_done == self.config.accumulation:
            raise BatchError(f"a step has {self.config.accumulation} micro-batches: call step() before the next backward()")
        if not self._hint:
            total = torch.tensor([weight * self.config.accumulation], dtype=torch.float64)
            self._all_reduce(total)
            self._hint = 2.0 ** round(math.log2(max(float(total), 1.0)))
        last = self._microbatches_done + 1 == self.config.accumulation
        self._reducer.begin(reduce=last or self._by_microbatch)
        (loss_sum * (self._scale.value / self._hint)).backward()
        self._reducer.end()
        self._blocks.end_backward()
        self._microbatches_done += 1
        self._loss_sum += float(loss_sum.detach())
        self._weight += weight
        self._tokens += tokens

    def _reduce(self) -> None:
        """What is left to reduce after the last backward: the step's totals, and whole gradients where states are whole."""
        works = [bucket.gather_grad() for bucket in self._placement.trainable]
        squares = sum((squared_norm(b.own_grad) for b in self._placement.trainable), torch.zeros((), dtype=torch.float64))
        missing = sum(len(b.parameters) - len(b.ever_arrived) for b in self._placement.trainable)
        self._totals = torch.tensor([float(squares), self._loss_sum, self._weight, missing, self._tokens], dtype=torch.float64)
        self._all_reduce(self._totals)
        for work in works:
            work.wait()

    def _update(self) -> None:
        """Clip, update the shards, publish the parameters; or skip all that after an overflow."""
        squares, loss_sum, weight, missing, tokens = self._totals.tolist()
        if self._needs_tokens and not tokens:
            raise BatchError(
                "the learning rate schedule is measured in tokens, but the batches carry no tokens (`input_ids`): "
                "give lr_schedule.total and lr_schedule.warmup (or train.length) in steps or samples"
            )
        self._loss = loss_sum / weight if weight else math.nan
        self._skipped = not (math.isfinite(squares) and math.isfinite(loss_sum)) or not weight
        self._lr = self._options.lr
        to_mean = self._hint / (weight * self._scale.value) if weight else 0.0
        self._norm = norm_of(squares, to_mean, master_dtype(self._dtype))
        overflow = self._skipped and bool(weight)  # a batch without a single label is skipped too, but is nobody's fault
        if overflow and not self._scale.dynamic and self.config.precision.on_nonfinite == "error":
            self._begin_step()
            raise NumericsError(f"step {self.state.step + 1}: the loss or a gradient is NaN or Inf (the loss is {self._loss:g})")
        self._blocks.release_all()
        if not self._skipped:
            factor = to_mean * clip_factor(self._norm, self.config.optimizer.clip)
            unused = self._unused() if missing else {}
            works = []
            for bucket, update in zip(self._placement.trainable, self._updates, strict=True):
                update.step(factor, self._options.groups, unused.get(bucket, ()))
                works.append(bucket.publish())
            for work in works:
                work.wait()
        if weight:
            self._scale.update(overflow)
        self.state.step += 1
        self.state.samples += self.config.batch.size
        self.state.tokens += int(tokens)
        self._options.advance(self.state.progress)
        self.state.lr = self._options.lr

    def _unused(self) -> dict[Any, set[int]]:
        """By bucket, the parameters that got a gradient on no rank in this step."""
        buckets = self._placement.trainable
        arrived = torch.tensor([float(i in b.ever_arrived) for b in buckets for i in range(len(b.parameters))])
        self._all_reduce(arrived)
        flags = iter(arrived.tolist())
        return {b: {i for i, flag in enumerate([next(flags) for _ in b.parameters]) if not flag} for b in buckets}

    def _result(self, began: float) -> StepResult:
        tokens = int(self._totals[4])
        result = StepResult(self.state.step, self._loss, self._norm, self._lr, self.state.loss_scale, self._skipped,
                            self.config.batch.size, tokens, time.perf_counter() - began)  # fmt: skip
        self.state.loss_scale = self._scale.value
        self._hint = 2.0 ** round(math.log2(max(float(self._totals[2]), 1.0)))
        self._begin_step()
        return result

    def _diagnose(self, batches: list[Any], random_state: Tensor) -> str:
        """Run the step's forwards and backwards again, watched, and tell which module first made a NaN or Inf, and on which rank."""
        torch.set_rng_state(random_state)
        found: list[str] = []
        with watch_nonfinite(self.module) as first:
            for batch in batches:
                loss, _ = self._objective(batch)
                self._reducer.begin(reduce=False)
                (loss / self._hint).backward()
                self._reducer.end()
                self._blocks.end_backward()
                found += first[:1]
        self._begin_step()
        reports = self.mesh.dp.gather_objects(found[:1])
        lines = [f"\n  rank {rank}: first made by {report[0]}" for rank, report in enumerate(reports) if report]  # type: ignore[index]
        return "".join(lines) + "\n  lower the learning rate, check the data, or set precision.on_nonfinite = \"skip\""

    def _all_reduce(self, totals: Tensor) -> None:
        on_device = totals.to(self.mesh.device)
        self.mesh.dp.all_reduce(on_device)
        totals.copy_(on_device)

    # ---- set-up

    def _place(self, blocks: Mapping[str, nn.Module], made: Any) -> Placement:
        zero, precision, several = self.config.zero, self.config.precision, self.config.accumulation > 1
        assert zero.stage != "auto"
        self._by_microbatch = several and zero.reduce_every == "microbatch" and self.mesh.dp.size > 1
        reduce = DTYPES[precision.reduce]
        local = reduce if several and not self._by_microbatch else self._dtype
        formats = Formats(self._dtype, master_dtype(self._dtype), reduce, local)
        return place(self.module, blocks, made, self.mesh.dp, zero, Residency.of_stage(zero.stage), formats,
                     self.mesh.device, self._by_microbatch)  # fmt: skip

    def _write(self, name: str, tensor: Tensor) -> None:
        """Take one initial value: into its bucket, or as a buffer."""
        if name in self._placement.where:
            bucket, slot = self._placement.where[name]
            bucket.write(slot, tensor)
            return
        owner, _, attribute = name.rpartition(".")
        self.module.get_submodule(owner)._buffers[attribute] = tensor.detach().clone()

    def _finish_buffers(self) -> None:
        """Buffers on the device, rank 0's everywhere."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer = buffer.to(self.mesh.device).contiguous()
                    self.mesh.dp.broadcast(buffer)

    def _tensors(self, master: bool = False) -> Iterator[tuple[list[str], Tensor]]:
        """Every parameter and persistent buffer, whole, with all its names; one bucket in memory at a time, valid until the next."""
        names: dict[tuple[int, str], list[str]] = {}
        for name, (bucket, slot) in self._placement.where.items():
            names.setdefault((id(bucket), slot.name), []).append(name)
        for bucket in self._placement.buckets:
            full = bucket.whole(master)
            for slot in bucket.layout.slots:
                yield names[id(bucket), slot.name], full[slot.start : slot.stop].view(slot.shape)
        persistent = self.module.state_dict(keep_vars=True).keys()
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if name in persistent:
                yield [name], buffer
