"""One optimizer step on the buckets: backwards, the reduction of their gradients, the update.

Invariant: what accumulates are sums (`step.totals`), so that a step does not depend on how its batch was
split.
Communication: the buckets' own, and that of `step.totals`; what several ranks have counts once."""

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
from polyreme.placement.full_parameters import Written
from polyreme.placement.placement import Placement
from polyreme.step.accumulation import has_room, keep_adding, make_room
from polyreme.step.batch.batches import MicroBatch
from polyreme.step.loss.graph import refuse_by_frequency
from polyreme.step.nonfinite import NonFinite
from polyreme.step.order import Order, Plan
from polyreme.step.precision import DTYPES, clip_factor, loss_scale, master_dtype
from polyreme.step.replicas import looks
from polyreme.step.state.progress import State, TrainingProgress
from polyreme.step.totals import Flags, StepSums, power_of_two
from polyreme.step.training_settings import TrainingSettings
from polyreme.step.user import given_gradients
from polyreme.zero.bucket import Bucket
from polyreme.zero.gather import Blocks
from polyreme.zero.parameter import own
from polyreme.zero.reduce import Reducer
from polyreme.zero.updates import Updates

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
    """Samples counted in this step, over all ranks; `tokens` likewise."""
    tokens: int
    """Positions of `input_ids`, without those that an `attention_mask` says are padding; 0 for a batch that
    is not text."""
    seconds: float
    """Since the step before ended, with all that was done between."""
    stop: bool
    """Whether any rank was asked to stop, before the totals of this step were taken."""


class Step:
    """`backward` once for each micro-batch, then `reduce`, then `update`; and so on."""

    def __init__(
        self,
        settings: TrainingSettings,
        sums: StepSums,
        placement: Placement,
        reducer: Reducer,
        blocks: Blocks,
        updates: Updates,
        buffers: Buffers,
        clips_unasked: bool,
    ) -> None:
        """`clips_unasked`: clipping is to be told of, once it happens."""
        self.progress = TrainingProgress(sums.options, loss_scale(settings.precision))
        self.order = Order(Plan(settings.batches.now.accumulation))
        """What this step has had, and what may come."""
        self.given: set[Tensor] = set()
        """Parameters whose `.grad` a script set, in the place of a backward."""
        self.flags = Flags()
        """What this rank tells all ranks in the next totals."""
        self.fits: int | None = None
        """The samples of a micro-batch that fit on the same mesh when what was loaded was saved."""
        self.rewritten = 0
        """How often a script set weights (`ParameterNumbers`)."""
        self._unsaved = False  # a rank told of a checkpoint that failed
        self.written = Written(placement.buckets, sums.mesh.loss, buffers.parameters)
        """What the user did to parameters between steps."""
        self.states = reducer.states
        """Which gradients are whole, under tensor parallelism."""
        self._nonfinite = NonFinite(settings.precision, self.progress, sums.mesh.rank == 0)
        self._settings, self._cut, self._sums = settings, settings.batches, sums
        self._placement, self._buckets = placement, placement.trainable
        self._reducer, self._blocks, self._updates, self.buffers = reducer, blocks, updates, buffers
        self._left_out = any(
            p.requires_grad for b in placement.buckets if not b.trainable for p in b.parameters
        )
        # until it has looked, or told
        self._looks = settings.batches.now.accumulation * sums.mesh.world_size > 1
        self._clips_unasked = clips_unasked
        for bucket in self._buckets:
            own(bucket.parameters, self)
        self.begin()

    @property
    def state(self) -> State:
        """How far training has come."""
        return self.progress.state

    @property
    def begun(self) -> bool:
        """Whether there are gradients that are not applied yet."""
        return self.order.phase != "idle"

    def begin(self) -> None:
        """Forget all that this step has so far, and forwards without a backward."""
        self.clear()
        self._blocks.restart()

    def clear(self) -> None:
        """Forget the gradients that this step has so far."""
        if self._reducer.under_way:  # a backward failed
            self._blocks.restart()
        self.order.restart()
        self._labelled = True  # the loss of the coming backward is one, and no zero
        given_gradients.take(self.given)
        self._scaled = False  # the coming backward of the user's is of what `scale` returned
        self._rescaled = False  # gradients were set, and their norm is not taken yet
        self._clip = self._settings.optimizer.clip
        self._sums.clear()
        self._factor: float | None = None  # see `root`
        self._watched: bool | None = None  # whether parameters or modules have hooks, once looked at
        self._began = time.perf_counter()
        self._updates.clear()
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
        """Let a step that has had its last backward have another one, if `plan` has that."""
        if not plan.extend:
            limit = self._sums.limit(self.order.microbatches, self._cut.now)
            raise OrderError(_ENDED if self.order.plan.announced else _ONE_TOO_MANY.format(limit))
        keep_adding(self._placement, self._settings)  # first, as it may refuse
        self.order.extend()
        self._reducer.expect(plan.to_come)

    def count_microbatches(self, recut: bool = False) -> None:
        """Let the config's count of micro-batches say again where a step ends; `recut`: which are of fewer
        samples now. Between steps."""
        if recut:
            make_room(self._placement, self._settings)
            self._looks = True
        if recut or self.order.plan.announced:
            self.order.plan = Plan(self._cut.now.accumulation)
            self._reducer.restart(self.order.plan.to_come)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on besides weights, optimizer states and random numbers, as JSON can
        hold it."""
        fits = self._cut.now.fits or self.fits
        return {**self.progress.state_dict(), "hint": self._sums.hint, "fits": fits}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from what `state_dict` gave. Returns what there is to say of the optimizer's options."""
        self.begin()
        self.fits = state.get("fits")
        notes = self.progress.load_state_dict(state)
        self._sums.hint = float(state["hint"])
        return notes

    def go_on_from(self, old: Step) -> None:
        """Go on from where the step of another training of the same model is, between steps."""
        self.load_state_dict(old.state_dict())
        self.written.note()
        self.flags, self._clips_unasked = old.flags, old._clips_unasked

    def note_written(self, bucket: Bucket) -> None:
        """Take note that a script has set weights of a bucket."""
        self.written.note(bucket)
        self.rewritten += 1

    def hears_unsaved(self) -> bool:
        """Whether a rank told of a checkpoint that failed, in totals since this was asked last."""
        heard, self._unsaved = self._unsaved, False
        return heard

    def clip_at(self, max_norm: float) -> float:
        """Clip to this norm in this step. Returns the norm before."""
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
        """Backward of one micro-batch's sum of losses; not `last`: of one of several such sums. keep: the
        graph, for another backward."""
        scaled, self._scaled = self._scaled, False
        if scaled and self._scale != 1.0:
            raise BatchError(
                "engine.backward after engine.scale, which it would do a second time: call the scaled loss' "
                "own backward(), or engine.backward of the loss as it was"
            )
        self._admit(last)
        self.differentiate(0, [self.root(loss_sum, weight, tokens, samples, last)], [None], last, keep)

    def complete(self, call: str, last: bool) -> None:
        """End the backwards of a step; those of micro-batches that it does not have differentiate nothing.
        Raises OrderError where that is too early for `call`. last: see `Engine.step`."""
        done, order, batch = given_gradients.backwards(self), self.order, self._cut.now
        count = order.plan.microbatches
        if done != count and not ((last or order.plan.announced) and done):
            early = _EARLY.format(call, done, batch.size, self._sums.mesh.data.size, batch.micro, count)
            raise OrderError(early + (_ENDS_BEFORE.format(call) if done else ""))
        if order.plan.announced and not order.is_over:
            order.move("ended")
            self._reducer.expect(1)
            self.differentiate(0, [], [])
        while not order.is_over:
            order.begin()
            self.differentiate(0, [], [])

    def enter(self, weight: float, tokens: int, samples: int, loss: Tensor | None = None) -> None:
        """Prepare for a backward that the user began, of one micro-batch's mean loss (None: it is not known),
        whose gradients come as they are."""
        scaled, self._scaled = self._scaled, False
        if self._scale != 1.0 and not scaled:
            raise ModelError(
                "loss.backward() in fp16, whose losses are multiplied by "
                f"{self._scale:g} to keep small gradients from vanishing: "
                "call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._admit()
        self._look_at([] if loss is None else [loss])
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
        """Refuse a backward that is one too many, or would add to what a script set."""
        given_gradients.refuse(self.given)
        if self._reducer.under_way:
            raise OrderError(_FAILED)
        if self.order.is_over:
            self._extend(self.order.plan)
        self.order.begin(last)

    @property
    def _scale(self) -> float:
        """What losses are multiplied by."""
        return self.progress.scale.value

    def root(self, loss_sum: Tensor, weight: float, tokens: int, samples: int, last: bool = True) -> Tensor:
        """What the backward of a micro-batch begins with, from its sum of losses, which is counted (its
        weight by the `last` one alone).

        Where parameters or modules have hooks, or no optimizer takes gradients, these are of the mean loss as
        without an engine, and scaled when they are taken. In a pipeline only the last stage knows by what."""
        self._sums.count(weight * last, tokens * last, samples * last, self._cut.now.accumulation)
        self._sums.add_loss(loss_sum)
        self._labelled = bool(weight)
        if self._watched is None:
            one_stage = self._sums.mesh.pp.size == 1
            self._watched = one_stage and (self._left_out or self._reducer.watched or self._blocks.watched)
        self._factor = weight / self._sums.hint if self._watched and weight else None
        return loss_sum * (self._scale / (self._sums.hint if self._factor is None else weight))

    def differentiate(
        self,
        stage: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        last: bool = True,
        keep: bool = False,
    ) -> None:
        """A backward of a pipeline stage: add to what the step has, and reduce over the ranks what is
        complete, if this is the `last` backward of a micro-batch."""
        self._look_at(roots)
        self._reducer.begin(stage, self._factor, last)
        self._read_ahead()
        if any(root.requires_grad for root in roots):
            with _running(self, stage, roots, gradients), gradients_by_rows(), _graphs_once():
                torch.autograd.backward(roots, gradients, retain_graph=keep)
        else:  # nothing up to here is trained; or a loss of no labels depends on nothing
            self._blocks.pass_by()
        self._reducer.end()
        self._blocks.end_backward(last)

    def differentiate_inputs(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[], None]:
        """The first half of a backward: only what the stage before needs. Returns the second, which gives the
        parameters their gradients and may be called at any later time of the step."""
        weights = WeightGradients()
        self._look_at(roots)
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
            self._reducer.end()

        return rest

    def reduce(self) -> None:
        """Sum the totals over the ranks after the last backward, and gather whole gradients where states are
        whole. Once a step."""
        if self.order.phase == "reduced":
            return
        self.order.move("reduced")
        self._looks = False
        tied = [(b.tie, b.gradients) for b in self._buckets if b.tie is not None]
        for work in [tie.all_reduce(gradients.own_shard) for tie, gradients in tied]:
            work.wait()  # copies of a parameter on other stages
        self.buffers.share()
        works = [bucket.gradients.gather() for bucket in self._buckets]
        self._updates.read_gradients()
        missing = sum(len(b.parameters) - len(b.gradients.ever_arrived) for b in self._buckets)
        self._sums.reduce(_squares(self), missing, self.flags, self.buffers.has_news(), self.written)
        self._unsaved = self._sums.totals.unsaved > 0
        for work in works:
            work.settle()  # the update scales gradients in place

    def so_far(self, parameter: Tensor) -> Tensor | None:
        """What this rank's backwards of the step have added up for a parameter, of the sum of their weighted
        losses; None where none has, or it is reduced already. Between backwards."""
        reduced = self.order.phase == "reduced"
        found = None if reduced or self._reducer.under_way else self._reducer.so_far(parameter)
        return None if found is None else found.double() * (self._sums.hint / self._scale)

    def put_gradient(self, bucket: Bucket, index: int, mean: Tensor) -> None:
        """Set this rank's part of the reduced gradient of a bucket's parameter so that `mean`, flat and
        whole, is that of the mean over the global batch. The norm is taken anew when it is asked for."""
        bucket.gradients.write(index, mean / self.to_mean)
        self._rescaled = True

    def update(self) -> StepResult:
        """Clip, update the shards and publish the parameters; or leave them alone after an overflow.

        Raises NumericsError for NaN or Inf without a dynamic loss scale, if precision.on_nonfinite = "error":
        nothing is updated."""
        norm, totals, scale, began = self.norm, self._sums.totals, self._scale, self._began
        lr = self.progress.options.lr
        self.progress.check_tokens(totals.tokens)
        # a batch without a single label is skipped too
        skipped = not totals.weight or self._nonfinite.skips(totals)
        self._blocks.release_all()
        for bucket in self._buckets:
            bucket.settle()
        if totals.buffers or self.buffers.is_due():
            self.buffers.find(totals.samples, totals.tokens, self._cut.now.accumulation)
        if totals.written:
            self.written.take_in()
        if not skipped:
            skips = self._settings.optimizer.unused == "skip" and self._buckets
            unused = _unused(self._buckets, self._sums) if totals.missing and skips else {}
            factor = self.to_mean * (_clipping(self, norm) if totals.is_finite else 1.0)
            self._updates.step(factor, self.progress.options.groups, unused, self.state.step)
        if totals.weight:
            self.progress.scale.update(overflow=skipped)
            self._sums.hint = power_of_two(totals.weight)
        self.buffers.end_step()
        samples, tokens = int(totals.samples), int(totals.tokens)
        self.progress.advance(samples, tokens, skipped)
        self.written.note()
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
        )

    @property
    def to_mean(self) -> float:
        """What reduced gradients times it are those of the mean over the global batch. After `reduce`."""
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

    def _look_at(self, roots: Sequence[Tensor]) -> None:
        """Begin a backward. In the first step, refuse gradients that depend on how the batch is cut."""
        if self._looks:
            refuse_by_frequency(roots)
        if not self.order.is_over:
            self.order.move("accumulating")

    def _read_ahead(self) -> None:
        """Begin to read, in the last backward, what the update begins with."""
        if self._reducer.is_last:
            self._updates.read_states()


def _unused(buckets: Sequence[Bucket], sums: StepSums) -> dict[Bucket, set[int]]:
    """The parameters that got a gradient on no rank in this step, by bucket."""
    here = [float(i in b.gradients.ever_arrived) for b in buckets for i in range(len(b.parameters))]
    arrived = iter(sums.over_data(here))
    return {
        b: {i for i, count in enumerate([next(arrived) for _ in b.parameters]) if not count} for b in buckets
    }


def measure(step: Step) -> None:
    """Take the norm of reduced gradients that were changed. All ranks must call."""
    step._sums.measure(_squares(step))
    step._rescaled = False


def _squares(step: Step) -> Tensor:
    """The sum of squares of this rank's gradients."""
    squares = [bucket.gradients.squares() for bucket in step._buckets]
    return torch.stack(squares or [torch.zeros((), dtype=torch.float64, device=step._sums.device)]).sum()


def _begin_next(step: Step) -> None:
    """Begin the next step, which may be one that looks at how parameters are used."""
    step.begin()
    if step.states is not None:
        step.states.parts.allow()
        if looks(step.state.step + 1):
            step.states.look_again()


def count_elsewhere(step: Step, micro_batches: Sequence[MicroBatch]) -> None:
    """Count micro-batches whose loss another stage of the pipeline has, in that one's place."""
    for each in micro_batches:
        step._sums.count_elsewhere(each.weight or each.samples, each.tokens, each.samples)


def _clipping(step: Step, norm: float) -> float:
    """What clips gradients of this norm. Warns the first time that nobody asked for it."""
    factor = clip_factor(norm, step._clip)
    if step._clips_unasked and factor < 1:
        step._clips_unasked = False
        warn(_CLIPPED.format(norm, step._clip))
    return factor


@contextmanager
def _running(
    step: Step, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Iterator[None]:
    """A backward of this engine's, or its second half, of no `roots`: to others it is foreign."""
    global _current
    states = step.states
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


_EARLY = (
    "{}() after {} backward() calls, but batch.size = {} over {} ranks with batch.micro = {} makes {} a step"
)
_ENDS_BEFORE = ": call {}(last=True) where the data ends before"
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
