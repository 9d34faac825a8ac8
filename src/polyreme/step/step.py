"""One optimizer step on the buckets: backwards, the reduction of their gradients, the update.

Invariant: losses and gradients accumulate as sums (`step.totals`), so that a step does not depend on how its
batch was split.
Communication: that of the buckets and of `step.totals`; a value that several ranks have counts once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import BatchError, ModelError, OrderError, warn
from polyreme.models.buffers import Buffers
from polyreme.optim.sparse_rows import gradients_by_rows
from polyreme.pipeline.weight_gradients import WeightGradients
from polyreme.placement.full_parameters import UserWrites
from polyreme.placement.placement import Placement
from polyreme.sequence.context import Division
from polyreme.step.accumulation import has_room, keep_adding, make_room
from polyreme.step.loss.graph import refuse_by_frequency
from polyreme.step.nonfinite import NonFinite
from polyreme.step.order import Order, Plan
from polyreme.step.precision import DTYPES, clip_factor, loss_scale, master_dtype
from polyreme.step.state.progress import TrainingProgress, TrainingState
from polyreme.step.totals import Flags, StepSums, power_of_two
from polyreme.step.training_settings import TrainingSettings
from polyreme.step.user import given_gradients
from polyreme.zero.bucket import Bucket
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import own
from polyreme.zero.reduce import Reducer
from polyreme.zero.sharded_optimizer import ShardedOptimizer

FIRST, AGAIN = 3, 100
"""The steps that look at how gradients are divided: the first ones, then every `AGAIN`-th."""

# its backward is under way. For all threads, as autograd runs a device's nodes in a thread of its own
_current: Step | None = None


def current() -> Step | None:
    """Return the step of the engine whose backward is under way; None in a backward that a user began."""
    return _current


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; the same on every rank but for `seconds` and `context`."""

    step: int
    loss: float
    """Mean over the whole global batch (over its labels, for language models); NaN where a backward was of
    several tensors at once, or began with a gradient."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    loss_scale: float
    skipped: bool
    """True if an overflow (NaN or Inf in a gradient), or a batch without any label, made this step leave the
    weights alone."""
    samples: int
    """Samples of this step, over all ranks."""
    tokens: int
    """Positions of `input_ids` over all ranks, without those that an `attention_mask` marks as padding; 0 for
    a batch that is not text."""
    seconds: float
    """Time since the end of the step before, with everything in between."""
    stop: bool
    """True if any rank was asked to stop before the totals of this step were taken."""
    spike: str = ""
    """What is far beyond the last steps' with this one (`sentinels.spike`): loss, gradient norm or both, and
    the place in the data; "" for a step like others, and for a further one of the same spike."""
    context: Division | None = None
    """How the sequences of this rank's samples were divided over mesh.cp; None where attention is the
    model's own."""


class Step:
    """One optimizer step after another: `backward` once for each micro-batch, then `reduce`, then
    `update_or_skip`."""

    def __init__(
        self,
        settings: TrainingSettings,
        sums: StepSums,
        placement: Placement,
        reducer: Reducer,
        blocks: Blocks,
        optimizer: ShardedOptimizer,
        buffers: Buffers,
        clips_unasked: bool,
    ) -> None:
        """`clips_unasked`: warn once when the default of optimizer.clip clips."""
        self.progress = TrainingProgress(sums.options, loss_scale(settings.precision))
        self.order = Order(Plan(settings.batches.now.accumulation))
        """The phase of the step."""
        self.given: set[Tensor] = set()
        """Parameters whose `.grad` a script set, in the place of a backward."""
        self.flags = Flags()
        """Flags of this rank, sent with the next totals."""
        self.fits: int | None = None
        """The samples of a micro-batch that fit, from a loaded checkpoint of the same mesh."""
        self.rewritten = 0
        """Times that a script set weights (`ParameterNumbers`)."""
        self._unsaved = False  # True if a rank reported a failed checkpoint
        self.user_writes = UserWrites(placement.buckets, sums.mesh.loss, buffers.parameters)
        """The user's writes to parameters between steps."""
        self.states = reducer.states
        """The gradients that are whole, under tensor parallelism."""
        self._nonfinite = NonFinite(settings.precision, self.progress, sums.mesh.rank == 0)
        self._settings, self._cut, self._sums = settings, settings.batches, sums
        self._placement, self._buckets = placement, placement.trainable
        self._reducer, self._blocks, self._optimizer, self.buffers = reducer, blocks, optimizer, buffers
        frozen = [p for b in placement.buckets if not b.trainable for p in b.parameters]
        self._left_out = any(p.requires_grad for p in frozen)
        # True until the first step has checked gradients
        self._checks_roots = settings.batches.now.accumulation * sums.mesh.world_size > 1
        self._clips_unasked = clips_unasked
        for bucket in self._buckets:
            own(bucket.parameters, self)
        self.begin()

    @property
    def state(self) -> TrainingState:
        """The progress of training."""
        return self.progress.state

    @property
    def begun(self) -> bool:
        """True if there are gradients that are not applied yet."""
        return self.order.phase != "idle"

    def begin(self) -> None:
        """Forget all gradients of this step, and forwards without a backward."""
        self.clear()
        self._blocks.restart()

    def clear(self) -> None:
        """Forget the gradients of this step."""
        if self._reducer.under_way:  # the last backward failed
            self._blocks.restart()
        self.order.restart()
        self.failed = False  # True if a `train_step` ended in an error and left some gradients
        self._labelled = True  # False where the coming backward is of a zero, without labels
        given_gradients.take(self.given)
        self._scaled = self._rescaled = False  # by `scale`, for the coming backward; by setting gradients
        self._clip = self._settings.optimizer.clip
        self._sums.clear()
        self._factor: float | None = None  # see `root`
        self._watched: bool | None = None  # True if parameters or modules have hooks; None until checked
        self._began = time.perf_counter()
        self._optimizer.clear()
        for bucket in self._buckets:
            bucket.gradients.clear()
        self._reducer.restart(self.order.plan.to_come)

    def set_boundary(self, is_last: bool, extend: bool = False, own: float = 1.0) -> None:
        """See `Engine.set_boundary`."""
        if self._sums.mesh.pp.size > 1:
            raise BatchError(
                "set_boundary on stages of a pipeline, whose schedule has batch.size: leave it out"
            )
        plan = Plan(self._cut.now.accumulation, is_last, extend, own)
        if not is_last and (self.order.is_over or (self.begun and not has_room(self._placement))):
            self._extend(plan)
        elif not is_last:
            make_room(self._placement, self._settings)
        self.order.plan = plan
        if not self.order.is_over:
            self._reducer.expect(plan.to_come)

    def _extend(self, plan: Plan) -> None:
        """Allow a backward after the step's last one. Raises OrderError where `plan` does not."""
        if not plan.extend:
            limit = self._sums.limit(self.order.microbatches, self._cut.now)
            raise OrderError(_ENDED if plan.announced else _ONE_TOO_MANY.format(limit))
        keep_adding(self._placement, self._settings)  # first, as it may raise
        self.order.extend()
        self._reducer.expect(plan.to_come)

    def count_microbatches(self, recut: bool = False) -> None:
        """End steps by the config's count of micro-batches again. `recut`: the micro-batches have fewer
        samples now. Call between steps."""
        if recut:
            make_room(self._placement, self._settings)
            self._checks_roots = True
        if recut or self.order.plan.announced:
            self.order.plan = Plan(self._cut.now.accumulation)
            self._reducer.restart(self.order.plan.to_come)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on besides weights, optimizer states and random numbers, as
        JSON can hold it."""
        fits = self._cut.now.fits or self.fits
        return {**self.progress.state_dict(), "hint": self._sums.hint, "fits": fits}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the result of `state_dict`. Returns notes on the optimizer's options, for the user."""
        self.begin()
        self.fits = state.get("fits")
        notes = self.progress.load_state_dict(state)
        self._sums.hint = float(state["hint"])
        return notes

    def continue_from(self, old: Step) -> None:
        """Continue from the step of another training of the same model, between steps."""
        self.load_state_dict(old.state_dict())
        self.user_writes.note()
        self.flags, self._clips_unasked = old.flags, old._clips_unasked

    def note_written(self, bucket: Bucket) -> None:
        """Note that a script has set weights of a bucket."""
        self.user_writes.note(bucket)
        self.rewritten += 1

    def take_unsaved(self) -> bool:
        """Return whether the totals since the last call reported a checkpoint that failed on any rank."""
        heard, self._unsaved = self._unsaved, False
        return heard

    def clip_at(self, max_norm: float) -> float:
        """Clip this step at `max_norm`. Returns the norm before."""
        self._clip, self._clips_unasked = max_norm, False
        return self.norm

    def backward(
        self,
        loss_sum: Tensor,
        weight: float,
        tokens: int,
        samples: int,
        last: bool = True,
        keep: bool = False,
    ) -> None:
        """Run the backward of one micro-batch's sum of losses. Not `last`: another sum of the same
        micro-batch follows. keep: retain the graph for it."""
        scaled, self._scaled = self._scaled, False
        if scaled and self._scale != 1.0:
            raise BatchError(
                "engine.backward after engine.scale, which it would do a second time: call the scaled loss' "
                "own backward(), or engine.backward of the loss as it was"
            )
        self._admit(last)
        self.differentiate(0, [self.root(loss_sum, weight, tokens, samples, last)], [None], last, keep)

    def complete(self, call: str, last: bool) -> None:
        """End the backwards of a step; micro-batches that are missing count for nothing. Raises OrderError
        where that is too early for `call`. last: see `Engine.step`."""
        done, order, batch = given_gradients.backwards(self), self.order, self._cut.now
        count = order.plan.microbatches
        if done != count and not ((last or order.plan.announced) and done):
            early = _EARLY.format(call, done, batch.size, self._sums.mesh.data.size, batch.micro, count)
            raise OrderError(early + (_ENDS_BEFORE.format(call) if done else _NONE))
        if order.plan.announced and not order.is_over:
            order.move("ended")
            self._reducer.expect(1)
            self.differentiate(0, [], [])
        while not order.is_over:
            order.begin()
            self.differentiate(0, [], [])

    def enter(self, weight: float, tokens: int, samples: int, loss: Tensor | None = None) -> None:
        """Prepare for a backward that the user began, of one micro-batch's mean loss (None: not known). Its
        gradients are scaled as they are taken."""
        scaled, self._scaled = self._scaled, False
        if self._scale != 1.0 and not scaled:
            raise ModelError(
                "loss.backward() in fp16, whose losses are multiplied by "
                f"{self._scale:g} to keep small gradients from vanishing: "
                "call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._admit()
        self._begin_backward([] if loss is None else [loss])
        self._sums.count(weight, tokens, samples, self._cut.now.accumulation)
        if loss is None:
            self._sums.add_loss(None)
        elif weight:
            value = loss.detach().reshape(()).double()
            self._sums.add_loss(value * (weight / self._scale if scaled else weight))
        self._reducer.begin(factor=weight / self._sums.hint)
        self._read_ahead()

    def scale(self, loss: Tensor) -> Tensor:
        """See `Engine.scale`."""
        self._scaled = True
        return loss * self._scale

    def leave(self) -> None:
        """End a backward that the user began, for this engine or for others."""
        own = self._reducer.under_way
        self._reducer.end()
        self._blocks.end_backward(own)

    def _admit(self, last: bool = True) -> None:
        """Refuse a backward beyond the step's last, or one that would add to a gradient that a script set."""
        given_gradients.refuse(self.given)
        if self._reducer.under_way or self.failed:
            raise OrderError(_FAILED)
        if self.order.is_over:
            self._extend(self.order.plan)
        self.order.begin(last)

    @property
    def _scale(self) -> float:
        """The factor on losses, 1 unless in fp16."""
        return self.progress.scale.value

    def root(self, loss: Tensor, weight: float, tokens: float, samples: float, last: bool = True) -> Tensor:
        """Return the scalar from which a micro-batch's backward begins, and count its sum of losses (its
        weight only with the `last` one).

        Where parameters or modules have hooks, or the optimizer leaves parameters out, the gradients are
        those of the mean loss, as without an engine, and are scaled when they are taken. Not in a pipeline,
        where only the last stage knows the factor."""
        self._sums.count(weight * last, tokens * last, samples * last, self._cut.now.accumulation)
        self._sums.add_loss(loss)
        self._labelled = bool(weight)
        if self._watched is None:
            one_stage = self._sums.mesh.pp.size == 1
            self._watched = one_stage and (self._left_out or self._reducer.watched or self._blocks.watched)
        self._factor = weight / self._sums.hint if self._watched and weight else None
        return loss * (self._scale / (self._sums.hint if self._factor is None else weight))

    def differentiate(
        self,
        stage: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        last: bool = True,
        keep: bool = False,
    ) -> None:
        """Run the backward of a pipeline stage: add to the step's gradients, and reduce those that are
        complete, if this is the `last` backward of a micro-batch."""
        self._begin_backward(roots)
        self._reducer.begin(stage, self._factor, last)
        self._read_ahead()
        if any(root.requires_grad for root in roots):
            with _running(self, stage, roots, gradients), gradients_by_rows(), _graphs_once():
                torch.autograd.backward(roots, gradients, retain_graph=keep)
        else:  # nothing before this is trained; or the loss has no labels and depends on nothing
            self._blocks.imitate_backward()
        self._reducer.end(waits=self._sums.mesh.pp.size == 1)
        self._blocks.end_backward(last)

    def differentiate_inputs(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[], None]:
        """Run the first half of a backward: only the gradients that the stage before needs. Returns the
        second half, which makes the parameters' gradients and may be called at any later time of the step."""
        weights = WeightGradients()
        self._begin_backward(roots)
        self._reducer.begin_inputs(stage)
        with weights.put_off(), gradients_by_rows(), _running(self, stage, roots, gradients):
            if roots:
                torch.autograd.backward(roots, gradients)
        self._blocks.end_backward()

        def rest() -> None:
            self._reducer.begin_weights(stage)
            self._read_ahead()
            with _running(self, stage, (), ()):
                weights.accumulate(self._reducer)
            self._reducer.end(waits=False)

        return rest

    def reduce(self) -> None:
        """Sum the totals over the ranks after the last backward, and gather whole gradients where states are
        whole. Once a step."""
        if self.order.phase == "reduced":
            return
        self.order.move("reduced")
        self._reducer.finish()
        self._checks_roots = False
        tied = [(b.tie, b.gradients) for b in self._buckets if b.tie is not None]
        for work in [tie.all_reduce(gradients.own_shard) for tie, gradients in tied]:
            work.wait()  # adds up copies of a parameter on other stages
        self.buffers.share()
        works = [bucket.gradients.gather() for bucket in self._buckets]
        self._optimizer.read_gradients()
        missing = sum(len(b.parameters) - len(b.gradients.ever_arrived) for b in self._buckets)
        news, written = self.buffers.has_news(), self.user_writes.seen(self._sums.device)
        self._sums.reduce(_squares(self), missing, self.flags, news, written, self.progress.counts())
        self._unsaved = self._sums.totals.unsaved > 0
        for work in works:
            work.settle()  # the update scales gradients in place

    def so_far(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter that this rank's backwards of the step have added up, of the sum
        of their weighted losses; None before the first, or once it is reduced. Call between backwards."""
        reduced = self.order.phase == "reduced"
        found = None if reduced or self._reducer.under_way else self._reducer.so_far(parameter)
        return None if found is None else found.double() * (self._sums.hint / self._scale)

    def put_gradient(self, bucket: Bucket, index: int, mean: Tensor) -> None:
        """Set this rank's elements of the reduced gradient of a bucket's parameter. `mean` is the whole
        gradient of the mean loss, flat. The norm is computed again when it is asked for."""
        bucket.gradients.write(index, mean / self.to_mean)
        self._rescaled = True

    def update_or_skip(self) -> StepResult:
        """Clip, update the shards and publish the parameters; or leave them alone after an overflow.

        Raises NumericsError for NaN or Inf without a dynamic loss scale, if precision.on_nonfinite = "error";
        nothing is updated then."""
        norm, totals, scale, began = self.norm, self._sums.totals, self._scale, self._began
        lr = self.progress.options.lr
        self.progress.check_tokens(totals.tokens)
        # a batch without any label is skipped too
        skipped = not totals.weight or self._nonfinite.skips(totals)
        self._blocks.release_all()
        for bucket in self._buckets:
            bucket.settle()
        if totals.buffers or self.buffers.is_due():
            self.buffers.agree(totals.samples, totals.tokens, self._cut.now.accumulation)
        if totals.written:
            self.user_writes.take_in()
        self._sums.check()
        if not skipped:
            skips = self._settings.optimizer.unused == "skip" and self._buckets
            unused = _unused(self._buckets, self._sums) if totals.missing and skips else {}
            factor = self.to_mean * (_clipping(self, norm) if totals.is_finite else 1.0)
            self._optimizer.step(factor, self.progress.options.groups, unused, self.state.step)
        if totals.weight:
            self.progress.scale.update(overflow=skipped)
            self._sums.hint = power_of_two(totals.weight)
        self.buffers.end_step()
        samples, tokens = round(totals.samples), round(totals.tokens)
        self.progress.advance(samples, tokens, skipped)
        self.user_writes.note()
        _begin_next(self)
        return StepResult(
            step=self.state.step,
            loss=totals.mean_loss,
            grad_norm=norm,
            lr=lr,
            loss_scale=scale,
            skipped=skipped,
            samples=samples,
            tokens=tokens,
            seconds=time.perf_counter() - began,
            stop=totals.stop > 0,
            context=self._cut.division,
        )

    @property
    def to_mean(self) -> float:
        """The factor that turns reduced gradients into those of the mean over the global batch. After
        `reduce`."""
        return self._sums.to_mean(self._scale)

    @property
    def norm(self) -> float:
        """The norm of these gradients, before clipping. All ranks must ask."""
        if self._rescaled:
            measure(self)
        return self._sums.norm(self._scale, master_dtype(DTYPES[self._settings.precision.compute]))

    def plateau(self, metric: float) -> float:
        """See `Engine.plateau`."""
        return self.progress.observe(self._sums.mean(metric))

    def _begin_backward(self, roots: Sequence[Tensor]) -> None:
        """Begin a backward. In the first step, refuse gradients that depend on how the batch is cut."""
        if self._checks_roots:
            refuse_by_frequency(roots)
        if not self.order.is_over:
            self.order.move("accumulating")

    def _read_ahead(self) -> None:
        """Begin to read the first numbers of the update, in the last backward."""
        if self._reducer.is_last:
            self._optimizer.read_states()


def _unused(buckets: Sequence[Bucket], sums: StepSums) -> dict[Bucket, set[int]]:
    """Return the parameters that got a gradient on no rank in this step, by bucket."""
    here = [float(i in b.gradients.ever_arrived) for b in buckets for i in range(len(b.parameters))]
    arrived = iter(sums.over_data(here))
    return {
        b: {i for i, count in enumerate([next(arrived) for _ in b.parameters]) if not count} for b in buckets
    }


def measure(step: Step) -> None:
    """Compute the norm of reduced gradients again, after they were changed. All ranks must call."""
    step._sums.measure(_squares(step))
    step._rescaled = False


def _squares(step: Step) -> Tensor:
    """Return the sum of squares of this rank's gradients."""
    return torch.stack(
        [bucket.gradients.squares() for bucket in step._buckets]
        or [torch.zeros((), dtype=torch.float64, device=step._sums.device)]
    ).sum()


def _begin_next(step: Step) -> None:
    """Begin the next step, which may check again how parameters are used."""
    step.begin()
    if step.states is not None:
        step.states.divided.allow()
        if step.state.step < FIRST or (step.state.step + 1) % AGAIN == 0:
            step.states.look_again()


def count_elsewhere(step: Step, weight: float, tokens: float, samples: float) -> None:
    """Count a micro-batch whose loss another pipeline stage has, in its place (on a simulated rank)."""
    step._sums.count_elsewhere(weight, tokens, samples)


def _clipping(step: Step, norm: float) -> float:
    """Return the factor that clips gradients of this norm. Warns the first time the default limit clips."""
    factor = clip_factor(norm, step._clip)
    if step._clips_unasked and factor < 1:
        step._clips_unasked = False
        warn(_CLIPPED.format(norm, step._clip))
    return factor


@contextmanager
def _running(
    step: Step, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Iterator[None]:
    """Mark a backward, or its second half (without `roots`), as this engine's, so that other engines drop its
    gradients."""
    global _current
    states = step.states
    if states is not None:
        states.labelled = step._labelled
    if states is not None and step._labelled:
        states.follow(roots, stage, loss=None in gradients)
    _current, before = step, _current
    try:
        yield
    finally:
        _current = before
        if states is not None:
            states.end()


@contextmanager
def _graphs_once() -> Iterator[None]:
    """Raise BatchError with advice where a backward comes to a graph that another one has freed."""
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


_EARLY = (
    "{}() after {} backward() calls, but batch.size = {} over {} ranks with batch.micro = {} makes {} a step"
)
_ENDS_BEFORE = ": call {}(last=True) where the data ends before"
_NONE = ": call engine.backward(loss) of each first; those before the last step() were used up by it"
_FAILED = "the backward before this one ended in an error: call engine.zero_grad(), and begin the step again"
_ENDED = (
    "engine.set_boundary(True), or a batch.size of one micro-batch, said that the backward before this one "
    "is the last of its step: call step() before the next backward, or zero_grad() to drop these gradients"
)
_ONE_TOO_MANY = (
    "{}. Otherwise call step() before the next backward(), or zero_grad() to drop these gradients. Add the "
    "losses of one micro-batch up, or call engine.backward(loss, last=False) for all but the last"
)
_CLIPPED = (
    "gradients of norm {0:g} are clipped to {1:g}, the default of optimizer.clip, beside an optimizer that "
    'was passed: optimizer.clip = "none" clips nothing, and optimizer.clip = {1} says that this is meant'
)
