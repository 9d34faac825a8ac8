"""The forwards and backwards of this rank: its row of the schedule on the micro-batches of a step, for
training, for evaluation, and once more to find the origin of a NaN.

Communication: that of the row's actions (`pipeline.executor`), and the totals of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.errors import BatchError, NumericsError, named, warn
from polyreme.models import huggingface
from polyreme.models.attention import ignores
from polyreme.pipeline import weight_gradients
from polyreme.pipeline.executor import Calls, Row, RunStage, Stages
from polyreme.pipeline.placeholders import absent, shown
from polyreme.pipeline.rank import PipelineRank
from polyreme.pipeline.schedule import Action, next_backwards
from polyreme.step.batch.batches import MicroBatch, filled, is_list, micro_batches, micro_batches_of
from polyreme.step.engine_context import EngineContext
from polyreme.step.loss.graph import Unrecorded, refuse_penalty, untrained_parameters
from polyreme.step.loss.objective import Objective
from polyreme.step.memory.fit import UNKNOWN, FirstBatch, agreed, derived
from polyreme.step.precision import GRADIENT, MODEL, autocast, cast_floating, watch_nonfinite
from polyreme.step.step import Step, count_elsewhere
from polyreme.tensor.rng import restore_rng_states, rng_states
from polyreme.zero.gather import Blocks


@dataclass(frozen=True)
class EvalResult:
    """Mean loss over the global batch, and the weight (labels, or samples) that it is the mean of."""

    loss: float
    weight: float


class Passes:
    """Runs forwards and backwards of the model; `blocks` gathers parameters for them, and `step` takes losses
    and gradients."""

    def __init__(
        self,
        context: EngineContext,
        pipeline: PipelineRank,
        stages: Mapping[int, RunStage],
        objective: Objective,
        step: Step,
        blocks: Blocks,
        first: FirstBatch | None,
    ) -> None:
        """stages: how to run each stage of this rank. first: finds how many samples fit, if the config leaves
        that open."""
        mesh = context.mesh
        self._settings, self._mesh, self._randomness = context.settings, mesh, context.randomness
        self._sequences = context.sequences
        self._unread = self._sequences is None and ignores(objective.model, "document_ids")
        self._uncalled = {*pipeline.mine}  # stages that had no backward yet
        self._objective, self._activations = objective, context.activations
        self._step, self._blocks, self._first = step, blocks, first
        self._follow(pipeline)
        self._loss_checked = mesh.pp.size == 1  # True once the loss of a pipeline was checked
        self._warned_untrained = objective.is_own  # warned of parameters of a loss_fn
        model, repeated = objective.model, (nn.ModuleList, nn.Sequential)
        lists = (name for name, m in model.named_modules() if isinstance(m, repeated))
        self._lists = tuple(f"{name}.".lstrip(".") for name in lists)
        self._parameters = [] if self._loss_checked else [*model.named_parameters()]
        self._of_blocks = {id(p): name for name, p in self._parameters if name.startswith(self._lists)}
        self._absent = [] if objective.is_own else absent(model)
        self._stages = Stages(pipeline.rank_of, mesh, stages)
        self._training = Calls(
            enter=lambda action: self.enter(action.stage, action.microbatch or 0, self._coming[action]),
            forward=self._output,
            loss=self._take,
            root=lambda each, loss: step.root(loss[0], loss[1], each.tokens, each.samples),
            differentiate=self._differentiate,
            look=self._plain_output,
        )

    def _follow(self, pipeline: PipelineRank) -> None:
        self._pipeline, self._coming = pipeline, next_backwards(pipeline.row)

    def fitted(self, batch: Any, found: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches of a step: `found`, or others where the first step decides how many
        samples fit. That number is the resumed run's, or what the first micro-batch shows; later steps keep
        it. All ranks must call."""
        if self._first is None:
            return found
        first = partial(self._first.fit, batch=found[0], objective=self._objective)
        self._first, batches, reason = None, self._settings.batches, ""
        before, fits = batches.now.accumulation, self._step.fits
        if fits is None:
            fits, reason = agreed(self._mesh, (lambda _: UNKNOWN) if is_list(batch) else first)
        batches.fit(fits)
        if reason and fits is not None:
            warn(derived(batches.now.micro, reason), every=True)
        if (count := batches.now.accumulation) == before:
            return found
        self._follow(self._settings.pipeline())
        self._objective.cut(is_split=True, share=1 / count if batches.now.mean == "ranks" else None)
        self._step.count_microbatches(recut=True)
        return micro_batches(batch, batches.now, first=False)

    @contextmanager
    def step(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Row]:
        """Yield this rank's row of a step, to be executed inside.

        A NumericsError from inside is raised with the module that first made a NaN or Inf."""
        before, device = rng_states(self._mesh.device), self._mesh.device
        # before they are moved, as counting on a device would wait for it
        parts = [self._part(each.batch, i) for i, each in enumerate(micro_batches)]
        if self._sequences is not None:
            self._settings.batches.division = self._sequences.division(len(parts))
        weights = [
            self._objective.visible_weight(part) if each.samples else 0
            for part, each in zip(parts, micro_batches, strict=True)
        ]
        moved = [
            MicroBatch(
                cast_floating(part, None, device),
                each.samples,
                each.samples and huggingface.count_tokens(each.batch),
                weight,
            )
            for each, part, weight in zip(micro_batches, parts, weights, strict=True)
        ]
        if not self._pipeline.has_loss and self._pipeline.counts(self._mesh.pp):  # on a simulated rank
            for each in moved:
                count_elsewhere(self._step, each.weight or each.samples, each.tokens, each.samples)
        try:
            with self._row(moved) as row:
                yield row
        except NumericsError as error:
            restore_rng_states(before, device)
            why = self._diagnose(moved)
            self._step.failed = self._step.begun
            raise NumericsError(f"{error}{why}") from None
        except BaseException:
            self._step.failed = self._step.begun
            raise
        finally:
            self._end_sequences()

    def _part(self, batch: Any, microbatch: int = 0) -> Any:
        """Return this rank's part of the sequences of a micro-batch, to which it goes on."""
        if self._sequences is None:
            return self._read(batch)
        part = self._sequences.cut(batch, microbatch)
        self._sequences.at(microbatch)
        return part

    def _read(self, batch: Any) -> Any:
        """Return a batch for a model that computes its attention by itself. Raises BatchError for documents
        that it would not keep apart."""
        if self._unread and isinstance(batch, Mapping) and batch.get("document_ids") is not None:
            raise BatchError(
                f"{type(self._objective.model).__name__} does not read document_ids, so that documents would "
                'see each other: write context.method = "gather", which keeps them apart on one rank, too, '
                "or give position_ids that begin anew, which many families read"
            )
        return batch

    def call(self, args: Any, kwargs: Any) -> tuple[Any, float | None]:
        """Return the model's output in the user's own loop; and where it is of this rank's part of sequences,
        the weight of the loss of the whole micro-batch, which is in it.

        The mean of the gradients of that loss over the ranks of mesh.cp is the gradient of its value, which
        all have alike."""
        if self._sequences is None:
            self._read(kwargs or (args[0] if args else None))
            args, kwargs = cast_floating((args, kwargs), None, self._mesh.device)  # type: ignore[misc]
            return self._objective.call(args, kwargs), None
        given: Any = (args, kwargs) if args and kwargs else args or kwargs
        batch, axis = args[0] if given is args and len(args) == 1 else given, self._mesh.cp
        with self._sequences.forward(batch) as part:
            output = self._objective.call((), cast_floating(part, None, self._mesh.device))  # type: ignore[arg-type]
        if torch.is_grad_enabled():
            self._settings.batches.division = self._sequences.division(1)
        if (labels := huggingface.count_labels(self._objective.model, self._sequences.whole)) is None:
            return output, None
        share = self._loss(output, part, None)[0] * (axis.size / max(labels, 1))
        total = share.detach().double()
        axis.all_reduce(total).wait()
        value = (total / (axis.size if labels else 0)).to(share.dtype)
        # the sum, of one number, hides from `weight_of` what a share is a mean over
        loss = (value + (share - share.detach())).sum()
        output = (
            (loss, *output[1:]) if isinstance(output, tuple) else type(output)(**{**output, "loss": loss})
        )
        return output, labels / axis.size

    def _end_sequences(self) -> None:
        if self._sequences is not None:
            self._sequences.at(None)

    def _row(self, micro_batches: Sequence[MicroBatch]) -> Row:
        shapes, place = [_shapes(each.batch) for each in micro_batches], self._pipeline
        return Row(self._stages, place.row, self._training, micro_batches, shapes, place.arrived)

    def evaluate(self, model: nn.Module, batch: Any) -> EvalResult:
        """See `Engine.eval_step`."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)

        def add(micro_batch: MicroBatch, output: Any) -> None:
            loss_sum, weight = self._loss(output, micro_batch.batch, None if micro_batch.samples else 0)
            totals.add_(torch.stack([loss_sum.double(), totals.new_tensor(weight)]))

        self._run_evaluation(model, batch, add)
        totals *= self._pipeline.counts(self._mesh.pp) * self._mesh.tp.alone()
        self._mesh.world.all_reduce(totals).wait()
        loss_sum, total = totals.tolist()
        return EvalResult(loss_sum / total if total else math.nan, total)

    def outputs(self, model: nn.Module, batch: Any, function: Callable[[Any, Any], Any]) -> list[Any]:
        """See `Engine.eval_outputs`."""
        found: list[Any] = []

        def take(micro_batch: MicroBatch, output: Any) -> None:
            if micro_batch.samples:
                found.append(function(output, micro_batch.batch))

        self._run_evaluation(model, batch, take)
        return found

    def enter(self, stage: int, microbatch: int, coming: tuple[int, int] | None = None) -> None:
        """Prepare a forward or backward for training. `coming`: stage and micro-batch of the backward after
        it."""
        self._blocks.at(stage, microbatch)
        if self._sequences is not None:
            self._sequences.at(microbatch)
        self._step.buffers.watch()
        weight_gradients.expect(Action("B", stage, microbatch) in self._pipeline.halved)
        if self._activations.offload is not None:
            self._activations.offload.at(stage, microbatch, coming)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context of a forward and its loss."""
        states = None if self._settings.compiles else self._step.states  # watching would be compiled, too
        watching = nullcontext() if states is None else states.watching()
        with autocast(self._settings.precision.compute, self._mesh.device), watching:
            yield

    def _run_evaluation(self, model: nn.Module, batch: Any, take: Callable[[MicroBatch, Any], None]) -> None:
        """Run the forwards of an evaluation, and on the last stage `take(micro-batch, output)` for each."""
        micro_batches = micro_batches_of(batch, self._settings.batches.now)
        counts: list[Any] = self._mesh.data.gather_objects(len(micro_batches))
        calls = Calls(
            lambda action: self._blocks.at(action.stage, action.microbatch or 0),
            lambda each: self._objective.output(each.batch),
            take,
        )
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            inside = self._randomness.inside(self._step.state.step, "look")
            with torch.no_grad(), self.autocast(), inside:
                for each in filled(micro_batches, max(counts)):
                    moved = replace(
                        each, batch=cast_floating(self._part(each.batch), None, self._mesh.device)
                    )
                    Row(
                        self._stages, self._pipeline.forward_row, calls, [moved], [_shapes(moved.batch)]
                    ).run()
        finally:
            self._end_sequences()
            for module, mode in modes.items():
                module.training = mode

    def _take(self, micro_batch: MicroBatch, output: Any) -> tuple[Tensor, float]:
        """Return the loss of a micro-batch that is trained on."""
        with self._activations.measured(), self.autocast():
            with shown(self._absent), self._watched(output):
                loss = self._loss(output, micro_batch.batch, micro_batch.weight)
            self._check_loss(output, *loss)
        self._activations.end_microbatch()
        return loss

    def _loss(self, output: Any, batch: Any, weight: float | None) -> tuple[Tensor, float]:
        """Return the loss of a micro-batch, within which divided parameters may not be read."""
        states = self._step.states
        with nullcontext() if states is None or self._objective.is_own else states.divided:
            return self._objective.loss(output, batch, weight)

    def _watched(self, output: Any) -> AbstractContextManager[object]:
        """Context that refuses, in a pipeline, a script's loss that reads parameters without a graph."""
        if self._loss_checked or self._objective.is_own or self._settings.compiles:
            return nullcontext()
        return Unrecorded(self._of_blocks, huggingface.tensors_in(output))

    def _check_loss(self, output: Any, loss: Tensor, weight: float) -> None:
        """Refuse a loss that the stages of a pipeline cannot compute (a model's own is checked once), and
        warn once of parameters of a loss_fn that no engine trains."""
        if not self._warned_untrained and loss.grad_fn is not None:
            self._warned_untrained = True
            if others := untrained_parameters(loss):
                shapes = named([f"of shape {tuple(each.shape)}" for each in others])
                warn(_UNTRAINED.format(shapes), every=self._mesh.pp.size > 1)
        if self._loss_checked or not weight or loss.grad_fn is None:
            return
        self._loss_checked = self._objective.is_own
        outputs = [] if self._objective.is_own else huggingface.tensors_in(output)
        made = [each for each in outputs if each.grad_fn is not None]
        refuse_penalty(loss, made, self._parameters, self._lists, len(self._pipeline.mine) == 1)

    def _output(self, micro_batch: MicroBatch) -> Any:
        """Return the model's output for a micro-batch that is trained on."""
        with self._activations.measured(), self.autocast():
            output = self._objective.output(micro_batch.batch)
        if not self._pipeline.has_loss:
            self._activations.end_microbatch()
        return output

    def _plain_output(self, micro_batch: MicroBatch) -> Any:
        """Return the model's output for a micro-batch, without measuring or watching."""
        with autocast(self._settings.precision.compute, self._mesh.device):
            return self._objective.output(micro_batch.batch)

    def _differentiate(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[], None] | None:
        """Run the backward that was entered, or its first half; then return the second half."""
        if self._sequences is not None and self._uncalled:
            self._uncalled.discard(stage)
            if not self._uncalled:
                self._sequences.check()
        second = None
        if weight_gradients.expected():
            second = self._step.differentiate_inputs(stage, roots, gradients)
        else:
            self._step.differentiate(stage, roots, gradients)
        if self._sequences is not None and stage == min(self._pipeline.mine):
            self._sequences.free()
        return second

    def _diagnose(self, micro_batches: Sequence[MicroBatch]) -> str:
        """Run the step's forwards and backwards again, watched, and return which module first made a NaN or
        Inf, and on which rank."""
        self._step.begin()
        inside = self._randomness.inside(self._step.state.step, "step")
        with watch_nonfinite(self._objective.model) as found, inside:
            self._row(micro_batches).run()
        gathered = self._mesh.gather_objects((self._mesh.rank, *found[:1]))
        reports = [report for report in gathered if len(report) > 1]
        # a bad number spoils gradients of earlier stages and outputs of later ones
        for later in (GRADIENT, MODEL):
            reports = [report for report in reports if later not in report[1]] or reports
        lines = [f"\n  rank {rank}: first made by {what}" for rank, what in sorted(reports)]
        advice = '\n  lower the learning rate, check the data, or set precision.on_nonfinite = "skip"'
        return "".join(lines) + advice


_UNTRAINED = (
    "the loss depends on parameters that are none of the model's ({}), and this engine trains none of them: "
    "make the module that has them a submodule of the model, or call requires_grad_(False) on it where they "
    "are to stay as they are"
)


def _shapes(batch: Any) -> Hashable:
    """Return shape and dtype of every tensor in a batch."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)
    )
