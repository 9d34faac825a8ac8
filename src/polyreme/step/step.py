"""One optimizer step on the buckets: what accumulates over its micro-batches, and how it ends.

Invariant: losses and gradients are sums until the end of the step, then divided by the weight (labels, or
samples) of the whole global batch; meanwhile they are divided by a power of two near it, which costs no
digit. So a step does not depend on how its batch was split.
Communication: the buckets' own, and one small all-reduce for each axis that carries norm, overflow, loss,
weight, tokens, the wish to stop, a checkpoint's failure, writes to weights and news of buffers together.
Loss, weight and tokens come from the ranks of the last pipeline stage, one of each tensor-parallel group;
what several ranks have counts once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyreme.config import Config, Progress
from polyreme.distributed.mesh import Mesh
from polyreme.errors import BatchError, ModelError, NumericsError
from polyreme.models.buffers import Buffers
from polyreme.offload.store import Stream
from polyreme.optim.groups import Options
from polyreme.optim.sparse_rows import gradients_by_rows
from polyreme.pipeline.weight_gradients import WeightGradients
from polyreme.step.precision import DTYPES, LossScale, clip_factor, master_dtype, norm_of
from polyreme.zero.bucket import Bucket
from polyreme.zero.full_parameters import Written
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import own
from polyreme.zero.partition import OffloadPlan
from polyreme.zero.reduce import Reducer
from polyreme.zero.sharded_optimizer import Update

_current: Step | None = (
    None  # whose backward is under way. For all threads: autograd runs a device's nodes in one of its own
)


def current() -> Step | None:
    """The step of the engine whose backward is under way; None in one that a user began."""
    return _current


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank but for `seconds`."""

    step: int
    loss: float
    """Mean over the whole global batch (over its labels, for language models); NaN where a backward was of
    several tensors at once, or began with a gradient."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    loss_scale: float
    skipped: bool
    """Whether an overflow (NaN or Inf in a gradient), or a batch without any label, made this step leave the
    weights alone."""
    samples: int
    """Of this step, over all ranks; `tokens` too."""
    tokens: int
    """Positions of `input_ids`, without those that an `attention_mask` says are padding; 0 for a batch that
    is not text."""
    seconds: float
    stop: bool
    """Whether any rank was asked to stop, before the totals of this step were taken."""


@dataclass
class State:
    """How far training has come."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    lr: float = 0.0
    loss_scale: float = 1.0

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise ModelError(
                f"engine.state.{name} = {value!r}: engine.state tells of the "
                "training, and changes nothing. The learning rate is set by "
                "optimizer.lr and lr_schedule of the config or by the lr_scheduler "
                "of initialize, how far training has come by engine.load"
            )
        super().__setattr__(name, value)

    def change(self, **values: float) -> None:
        """For the step alone."""
        self.__dict__.update(values)

    @property
    def progress(self) -> Progress:
        return Progress(self.step, self.samples, self.tokens)


@dataclass(frozen=True)
class _Totals:
    """Sums over the ranks."""

    squares: float
    loss: float
    weight: float
    missing: float  # gradients that did not arrive
    tokens: float
    hint: float
    stop: float  # ranks that were asked to
    unsaved: float  # ranks whose checkpoint failed
    unseen: float  # losses whose value is not known
    buffers: float  # ranks that have news of buffers
    samples: float
    written: float  # ranks whose parameters were written to from outside


class Step:
    """`backward` once for each micro-batch, then `reduce`, then `update`; and so on."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        tells: bool,
        buckets: Sequence[Bucket],
        reducer: Reducer,
        blocks: Blocks,
        updates: Sequence[Update],
        options: Options,
        scale: LossScale,
        offload: OffloadPlan,
        buffers: Buffers,
        written: Written,
    ) -> None:
        """`tells`: whether the loss that this rank has counts; there is one such rank for each data-parallel
        one."""
        self.state = State(lr=options.lr, loss_scale=scale.value)
        self.microbatches = 0
        """Backwards done in this step."""
        self.begun = False
        """Whether there are gradients that are not applied yet."""
        self.stop = False
        """Whether this rank was asked to stop: every rank hears of it in the next totals. May be set at any
        time."""
        self.unsaved = False
        """Whether a checkpoint that this rank was writing failed: every rank hears of it likewise, in
        `heard_unsaved`."""
        self.heard_unsaved = False
        self._config = config
        self._mesh = mesh
        self._tells = tells
        self._device = mesh.device
        self._buckets = buckets
        self._reducer = reducer
        self._blocks = blocks
        self._updates = updates
        self._options = options
        self._scale = scale
        self._offload, self._shared = offload, buffers
        self._coming: Stream | None = (
            None  # records for the update, read ahead while the last backward computes
        )
        self._gradient_stream: Stream | None = None  # gradients for it, read ahead from when all are there
        self._hint = 0.0  # a power of two near the weight of a global batch; 0 before the first
        self._skipped = Progress(0, 0, 0)  # of what was done, what left the weights alone
        self._totals = _Totals(*[0.0] * 12)
        for bucket in buckets:
            own(bucket.parameters, self)
        self.written = written
        """What the user did to parameters between steps."""
        self.begin()

    def begin(self) -> None:
        """Forget all that this step has so far, and forwards without a backward."""
        self.clear()
        self._blocks.restart()

    def clear(self) -> None:
        """Forget the gradients that this step has so far."""
        if self._reducer.under_way:  # a backward failed
            self._blocks.restart()
        self.microbatches, self.begun, self.reduced = 0, False, False
        self.clip = self._config.optimizer.clip
        # stays there: to read it would wait for the device
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._weight = 0.0
        self._tokens = self._samples = self._unseen = 0
        self._factor: float | None = None  # see `root`
        self._watched: bool | None = None  # whether parameters or modules have hooks, once looked at
        self._began = time.perf_counter()
        for stream in (self._coming, self._gradient_stream):
            if stream is not None:
                stream.close()
        self._coming = self._gradient_stream = None
        for bucket in self._buckets:
            bucket.gradients.clear()
        self._reducer.restart()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on besides weights, optimizer states and random numbers, as JSON can
        hold it."""
        return {
            **asdict(self.state),
            "good_steps": self._scale.good_steps,
            "hint": self._hint,
            "options": self._options.state_dict(),
            "skipped": self._skipped._asdict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.begin()
        self.state.change(**{key: int(state[key]) for key in ("step", "samples", "tokens")})
        self._skipped = Progress(**state.get("skipped", {}))
        self._options.load_state_dict(state["options"], self._scheduled())
        if self._scale.dynamic:
            self._scale.value, self._scale.good_steps = float(state["loss_scale"]), int(state["good_steps"])
        self._hint = float(state["hint"])
        self.state.change(lr=self._options.lr, loss_scale=self._scale.value)

    def backward(self, loss_sum: Tensor, weight: float, tokens: int, samples: int, last: bool = True) -> None:
        """Backward of one micro-batch's sum of losses; not `last`: of one of several such sums."""
        self._admit(last)
        self.differentiate(0, [self.root(loss_sum, weight, tokens, samples, last)], [None], last)

    def skip_the_rest(self) -> None:
        """In place of the micro-batches that this step has not: their backwards, with nothing to
        differentiate."""
        while self.microbatches < self._config.accumulation:
            self.microbatches += 1
            self.differentiate(0, [], [])

    def enter(self, weight: float, tokens: int, samples: int, loss: Tensor | None = None) -> None:
        """In a backward that the user began, of one micro-batch's mean loss (None: it is not known), whose
        gradients come as they are."""
        if self._scale.value != 1.0:
            raise ModelError(
                "loss.backward() in fp16, whose losses are multiplied by "
                f"{self._scale.value:g} to keep small gradients from vanishing: "
                "call engine.backward(loss)"
            )
        self._admit()
        self._count(weight, tokens, samples)
        if loss is None:
            self._unseen += 1
        elif weight:
            self._loss = self._loss + loss.detach().reshape(()).double() * weight
        self.begun = True
        self._reducer.begin(factor=weight / self._hint)
        self._read_ahead()

    def leave(self) -> None:
        """At the end of a backward that the user began, for this engine or for others."""
        own = self._reducer.under_way
        self._reducer.end()
        self._blocks.end_backward(own)

    def _admit(self, last: bool = True) -> None:
        """Refuse a backward that is one too many."""
        if self._reducer.under_way:
            raise BatchError(
                "the backward before this one ended in an error: "
                "call engine.zero_grad(), and begin the step again"
            )
        if self.microbatches == self._config.accumulation:
            raise BatchError(
                f"a step has {self._config.accumulation} micro-batches: call "
                "step() before the next backward(), or zero_grad() to drop "
                "these gradients. Add the losses of one micro-batch up, or "
                "call engine.backward(loss, last=False) for all but the last"
            )
        self.microbatches += last

    def _count(self, weight: float, tokens: int, samples: int) -> None:
        if not self._hint:
            self._hint = _power_of_two(self._sum([weight * self._config.accumulation])[0])
        self._weight += weight
        self._tokens += tokens
        self._samples += samples

    def root(self, loss_sum: Tensor, weight: float, tokens: int, samples: int, last: bool = True) -> Tensor:
        """What the backward of a micro-batch begins with, from its sum of losses, which is counted (its
        weight by the `last` one alone).

        Where parameters or modules have hooks, these see gradients of the mean loss, as without an engine,
        which are scaled when they are taken. In a pipeline only the last stage knows by what."""
        self._count(weight * last, tokens * last, samples * last)
        self._loss = self._loss + loss_sum.detach().double()
        if self._watched is None:
            self._watched = self._mesh.pp.size == 1 and (self._reducer.watched or self._blocks.watched)
        self._factor = weight / self._hint if self._watched and weight else None
        return loss_sum * (self._scale.value / (self._hint if self._factor is None else weight))

    def differentiate(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], last: bool = True
    ) -> None:
        """A backward of a pipeline stage: add to what the step has, and reduce over the ranks what is
        complete, if this is the `last` backward of a micro-batch."""
        self.begun = True
        self._reducer.begin(stage, self._factor, last)
        self._read_ahead()
        if any(root.requires_grad for root in roots):
            with gradients_by_rows(), self._running(), _graphs_once():
                torch.autograd.backward(roots, gradients)
        else:  # nothing up to here is to be trained; or a loss of no labels depends on nothing
            self._blocks.pass_by()
        self._reducer.end()
        self._blocks.end_backward(last)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A backward of this engine's: to others it is foreign."""
        global _current
        _current, before = self, _current
        try:
            yield
        finally:
            _current = before

    def differentiate_inputs(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[], None]:
        """The first half of a backward: only what the stage before needs. Returns the second, which gives the
        parameters their gradients and may be called at any later time of the step."""
        weights = WeightGradients()
        self.begun = True
        self._reducer.begin_inputs(stage)
        with weights.put_off(), gradients_by_rows(), self._running():
            if roots:
                torch.autograd.backward(roots, gradients)
        self._blocks.end_backward()

        def rest() -> None:
            self._reducer.begin_weights(stage)
            self._read_ahead()
            weights.accumulate(self._reducer)
            self._reducer.end()

        return rest

    def reduce(self) -> None:
        """After the last backward: the totals over the ranks, and whole gradients where states are whole.
        Once a step."""
        if self.reduced:
            return
        self.reduced = True
        tied = [(b.tie, b.gradients) for b in self._buckets if b.tie is not None]
        for work in [tie.all_reduce(gradients.own_shard) for tie, gradients in tied]:
            work.wait()  # copies of a parameter on other stages
        works = [bucket.gradients.gather() for bucket in self._buckets]
        if self._offload.gradient_files is not None:
            self._gradient_stream = self._offload.gradient_files.stream(
                [record for bucket in self._buckets for record in bucket.gradients.records or ()]
            )
        squares = self._squares()
        missing = sum(len(b.parameters) - len(b.gradients.ever_arrived) for b in self._buckets)
        hint = self._hint if self._tells and self._mesh.dp.rank == 0 else 0.0
        told = [
            self._weight * self._tells,
            missing,
            self._tokens * self._tells,
            hint,
            float(self.stop),
            float(self.unsaved),
            float(self._unseen),
            float(self._shared.has_news()),
            self._samples * self._tells,
        ]
        counts = torch.tensor(told, dtype=torch.float64, device=self._device)
        digest = self.written.digest(self._device)
        told_by = torch.stack([squares, self._loss * self._tells])
        written = torch.stack([self.written.seen(self._device), digest, digest.square()])
        totals = torch.cat([told_by, counts, written])
        self._mesh.dp.all_reduce(totals).wait()
        total, of_squares = totals[-2:].clone()
        totals[-3] += total.square() != of_squares * self._mesh.dp.size  # exact: whole numbers below 2^53
        totals = totals[:-2]
        self._mesh.product("tp", "pp").all_reduce(totals)
        self._totals = _Totals(*totals.tolist())
        self.heard_unsaved = self._totals.unsaved > 0
        for work in works:
            work.settle()  # the update scales gradients in place

    def _squares(self) -> Tensor:
        """Of this rank's gradients."""
        return torch.stack(
            [bucket.gradients.squares() for bucket in self._buckets] or [self._loss.new_zeros(())]
        ).sum()

    def measure(self) -> None:
        """Take the norm of gradients that were scaled after `reduce`."""
        squares = self._squares().reshape(1)
        self._mesh.product("dp", "tp", "pp").all_reduce(squares)
        self._totals = replace(self._totals, squares=squares.item())

    def update(self) -> StepResult:
        """Clip, update the shards and publish the parameters; or leave them alone after an overflow.

        Raises NumericsError for NaN or Inf without a dynamic loss scale (unless precision.on_nonfinite =
        "skip"): nothing is updated."""
        totals, scale, began = self._totals, self._scale.value, self._began
        if self._options.needs_tokens and not totals.tokens:
            raise BatchError(
                "the learning rate schedule is measured in tokens, "
                "but the batches carry no tokens (`input_ids`): "
                "give lr_schedule.total and lr_schedule.warmup (or train.length) in steps or samples"
            )
        good = math.isfinite(totals.squares) and math.isfinite(totals.loss)
        loss = totals.loss / totals.weight if totals.weight and not totals.unseen else math.nan
        if (
            not good
            and totals.weight
            and not self._scale.dynamic
            and self._config.precision.on_nonfinite == "error"
        ):
            raise NumericsError(
                f"step {self.state.step + 1}: the loss or a gradient is NaN or Inf (the loss is {loss:g})"
            )
        norm = self.norm
        skipped = not (good and totals.weight)  # a batch without a single label is skipped too
        self._blocks.release_all()
        for bucket in self._buckets:
            bucket.settle()
        if totals.written:
            self.written.take_in()
        if not skipped:
            self._apply(self.to_mean * clip_factor(norm, self.clip))
        if totals.weight:
            self._scale.update(overflow=skipped)
            self._hint = _power_of_two(totals.weight)
        self._shared.share(totals.buffers > 0)
        samples, tokens, lr, state = int(totals.samples), int(totals.tokens), self._options.lr, self.state
        state.change(step=state.step + 1, samples=state.samples + samples, tokens=state.tokens + tokens)
        if skipped:
            self._skipped = Progress(
                self._skipped.steps + 1, self._skipped.samples + samples, self._skipped.tokens + tokens
            )
        else:
            self._options.advance(self._scheduled())
        state.change(lr=self._options.lr, loss_scale=self._scale.value)
        self.written.note()
        self.begin()
        return StepResult(
            state.step,
            loss,
            norm,
            lr,
            scale,
            skipped,
            samples,
            tokens,
            time.perf_counter() - began,
            totals.stop > 0,
        )

    @property
    def to_mean(self) -> float:
        """What reduced gradients times it are those of the mean over the global batch. After `reduce`."""
        totals = self._totals
        return totals.hint / (totals.weight * self._scale.value) if totals.weight else 0.0

    @property
    def norm(self) -> float:
        """Of these gradients, before clipping."""
        return norm_of(
            self._totals.squares, self.to_mean, master_dtype(DTYPES[self._config.precision.compute])
        )

    def _scheduled(self) -> Progress:
        """How far the schedule of the learning rate has come: the steps that changed the weights, as with
        torch's."""
        done, skipped = self.state.progress, self._skipped
        return Progress(
            done.steps - skipped.steps, done.samples - skipped.samples, done.tokens - skipped.tokens
        )

    def plateau(self, metric: float) -> float:
        """See `Engine.plateau`."""
        totals = torch.tensor([metric, 1.0], dtype=torch.float64, device=self._device)
        self._mesh.product("dp", "tp", "pp").all_reduce(totals)
        total, count = totals.tolist()
        self._options.observe(total / count)
        self.state.change(lr=self._options.lr)
        return self.state.lr

    def _apply(self, factor: float) -> None:
        """Update every bucket from its gradients times `factor`; one bucket's parameters travel while the
        next is updated."""
        unused = self._unused() if self._totals.missing and self._buckets else {}
        works = []
        for bucket, update in zip(self._buckets, self._updates, strict=True):
            update.step(
                factor,
                self._options.groups,
                unused.get(bucket, ()),
                self._coming or (),
                self.state.step,
                self._gradient_stream or (),
            )
            works.append(bucket.publish())
        if self._coming is not None:
            self._coming.close()  # which waits until all is written
        for work in works:
            work.wait()

    def _read_ahead(self) -> None:
        """In the last backward: begin to read what the update begins with."""
        store = self._offload.store
        if store is not None and self._coming is None and self._reducer.is_last:
            self._coming = store.stream([record for update in self._updates for record in update.order])

    def _unused(self) -> dict[Bucket, set[int]]:
        """By bucket, the parameters that got a gradient on no rank in this step."""
        arrived = iter(
            self._sum(
                [
                    float(i in b.gradients.ever_arrived)
                    for b in self._buckets
                    for i in range(len(b.parameters))
                ]
            )
        )
        return {
            b: {i for i, count in enumerate([next(arrived) for _ in b.parameters]) if not count}
            for b in self._buckets
        }

    def _sum(self, values: Sequence[float]) -> list[float]:
        """`values` summed over the data-parallel ranks."""
        totals = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._mesh.dp.all_reduce(totals).wait()
        return totals.tolist()


@contextmanager
def _graphs_once() -> Iterator[None]:
    """Say what to do where a backward comes to a graph that another one has freed."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise BatchError(
            "the loss shares a part of its graph with one whose "
            "backward has freed it: add the losses of one forward up, "
            "engine.backward(first + second), or call the forward "
            "again (then engine.zero_grad(), and begin the step again)"
        ) from error


def _power_of_two(weight: float) -> float:
    return 2.0 ** round(math.log2(max(weight, 1.0)))
