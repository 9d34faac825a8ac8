"""The forwards and backwards of this rank: its row of the schedule on the micro-batches of a step, for
training, for evaluation, and once more to find what made a NaN.

Communication: what the row's actions do (`pipeline.executor`), and the totals of an evaluation."""

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

from polyreme.errors import NumericsError, named, warn
from polyreme.models import huggingface
from polyreme.pipeline import weight_gradients
from polyreme.pipeline.executor import Calls, Row, RunStage, Stages
from polyreme.pipeline.placeholders import absent, shown
from polyreme.pipeline.rank import PipelineRank
from polyreme.pipeline.schedule import Action, next_backwards
from polyreme.step.batch.batches import MicroBatch, filled, is_list, micro_batches, micro_batches_of
from polyreme.step.engine_context import EngineContext
from polyreme.step.loss.graph import Unrecorded, of_no_engine, refuse_penalty
from polyreme.step.loss.objective import Objective
from polyreme.step.memory.fit import UNKNOWN, FirstBatch, agreed, derived
from polyreme.step.precision import GRADIENT, MODEL, autocast, cast_floating, watch_nonfinite
from polyreme.step.step import Step, count_elsewhere
from polyreme.tensor.rng import generators, go_on_from
from polyreme.zero.gather import Blocks


@dataclass(frozen=True)
class EvalResult:
    """Mean loss over the global batch, and the weight (labels, or samples) that it is the mean of."""

    loss: float
    weight: float


class Passes:
    """Performs forwards and backwards of `module`. `step` and `blocks` take what they give, and have the
    parameters for them."""

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
        """stages: how to run each stage of this rank. first: what is still to tell how batches are cut, if
        something is."""
        mesh = context.mesh
        self._settings, self._mesh, self._randomness = context.settings, mesh, context.randomness
        self._objective, self._activations = objective, context.activations
        self._step, self._blocks, self._first = step, blocks, first
        self._follow(pipeline)
        self._looked = mesh.pp.size == 1  # at the loss of a pipeline
        self._told = objective.is_own  # of parameters that a loss_fn has
        model, repeated = objective.model, (nn.ModuleList, nn.Sequential)
        lists = (name for name, m in model.named_modules() if isinstance(m, repeated))
        self._lists = tuple(f"{name}.".lstrip(".") for name in lists)
        self._parameters = [] if self._looked else [*model.named_parameters()]
        self._of_blocks = {id(p): name for name, p in self._parameters if name.startswith(self._lists)}
        self._absent = [] if objective.is_own else absent(model)
        self._stages = Stages(pipeline.rank_of, mesh, stages)
        self._training = Calls(
            enter=lambda action: self.enter(action.stage, action.microbatch or 0, self._coming[action]),
            forward=self._output,
            loss=self._take,
            root=lambda each, loss: step.root(loss[0], loss[1], each.tokens, each.samples),
            differentiate=self._differentiate,
            look=self._look_beside,
        )

    def _follow(self, pipeline: PipelineRank) -> None:
        self._pipeline, self._coming = pipeline, next_backwards(pipeline.row)

    def fitted(self, batch: Any, found: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a step: those `found`; or, where it has to be told still how many fit, as many
        from now on as a run had that goes on, or as the first of them tells. All ranks must call."""
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
        """This rank's row of a step, to be gone through inside.

        Raises NumericsError that comes from inside with what made a NaN or an Inf."""
        before, device = generators(self._mesh.device), self._mesh.device
        # counting on a device would wait for it
        weights = [self._objective.visible_weight(m.batch) if m.samples else 0 for m in micro_batches]
        moved = [
            MicroBatch(
                cast_floating(each.batch, None, device),
                each.samples,
                each.samples and huggingface.count_tokens(each.batch),
                weight,
            )
            for each, weight in zip(micro_batches, weights, strict=True)
        ]
        if not self._pipeline.has_loss and self._pipeline.counts(self._mesh.pp):  # a simulated rank
            count_elsewhere(self._step, moved)
        try:
            with self._row(moved) as row:
                yield row
        except NumericsError as error:
            go_on_from(before, device)
            raise NumericsError(f"{error}{self._diagnose(moved)}") from None

    def _row(self, micro_batches: Sequence[MicroBatch]) -> Row:
        shapes = [_shapes(each.batch) for each in micro_batches]
        return Row(self._stages, self._pipeline.row, self._training, micro_batches, shapes)

    def evaluate(self, model: nn.Module, batch: Any) -> EvalResult:
        """See `Engine.eval_step`."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)

        def add(micro_batch: MicroBatch, output: Any) -> None:
            loss_sum, weight = self._loss(output, micro_batch.batch, None if micro_batch.samples else 0)
            totals.add_(torch.stack([loss_sum.double(), totals.new_tensor(weight)]))

        self._look(model, batch, add)
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

        self._look(model, batch, take)
        return found

    def enter(self, stage: int, microbatch: int, coming: tuple[int, int] | None = None) -> None:
        """Prepare a forward or backward for training; `coming`: the stage and micro-batch of the backward
        after it."""
        self._blocks.at(stage, microbatch)
        self._step.buffers.watch()
        weight_gradients.expect(Action("B", stage, microbatch) in self._pipeline.halved)
        if self._activations.offload is not None:
            self._activations.offload.at(stage, microbatch, coming)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context of a forward and its loss."""
        states = None if self._settings.compiles else self._step.states  # what watches would be compiled
        watching = nullcontext() if states is None else states.watching()
        with autocast(self._settings.precision.compute, self._mesh.device), watching:
            yield

    def _look(self, model: nn.Module, batch: Any, take: Callable[[MicroBatch, Any], None]) -> None:
        """The forwards of an evaluation; on the last stage, `take(micro-batch, output)` of each."""
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
                    moved = replace(each, batch=cast_floating(each.batch, None, self._mesh.device))
                    Row(
                        self._stages, self._pipeline.forward_row, calls, [moved], [_shapes(moved.batch)]
                    ).run()
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _take(self, micro_batch: MicroBatch, output: Any) -> tuple[Tensor, float]:
        """The loss of a micro-batch that is trained on."""
        with self._activations.measured(), self.autocast():
            with shown(self._absent), self._watched(output):
                loss = self._loss(output, micro_batch.batch, micro_batch.weight)
            self._look_at(output, *loss)
        self._activations.end_microbatch()
        return loss

    def _loss(self, output: Any, batch: Any, weight: float | None) -> tuple[Tensor, float]:
        """The loss of a micro-batch, in which divided parameters are not read."""
        states = self._step.states
        with nullcontext() if states is None or self._objective.is_own else states.parts:
            return self._objective.loss(output, batch, weight)

    def _watched(self, output: Any) -> AbstractContextManager[object]:
        """Refuses what a script's loss in a pipeline reads without a graph."""
        if self._looked or self._objective.is_own or self._settings.compiles:
            return nullcontext()
        return Unrecorded(self._of_blocks, huggingface.tensors_in(output))

    def _look_at(self, output: Any, loss: Tensor, weight: float) -> None:
        """Refuse a loss that the stages of a pipeline cannot compute; a model's own is looked at once.
        Say once that nobody trains what a loss_fn has of its own."""
        if not self._told and loss.grad_fn is not None:
            self._told = True
            if others := of_no_engine(loss):
                shapes = named([f"of shape {tuple(each.shape)}" for each in others])
                warn(_UNTRAINED.format(shapes), every=self._mesh.pp.size > 1)
        if self._looked or not weight or loss.grad_fn is None:
            return
        self._looked = self._objective.is_own
        outputs = [] if self._objective.is_own else huggingface.tensors_in(output)
        made = [each for each in outputs if each.grad_fn is not None]
        refuse_penalty(loss, made, self._parameters, self._lists, len(self._pipeline.mine) == 1)

    def _output(self, micro_batch: MicroBatch) -> Any:
        """The model's output for one micro-batch that is trained on."""
        with self._activations.measured(), self.autocast():
            output = self._objective.output(micro_batch.batch)
        if not self._pipeline.has_loss:
            self._activations.end_microbatch()
        return output

    def _look_beside(self, micro_batch: MicroBatch) -> Any:
        """The same, but nothing is measured or watched."""
        with autocast(self._settings.precision.compute, self._mesh.device):
            return self._objective.output(micro_batch.batch)

    def _differentiate(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[], None] | None:
        """The backward that was entered, or its first half."""
        if weight_gradients.expected():
            return self._step.differentiate_inputs(stage, roots, gradients)
        self._step.differentiate(stage, roots, gradients)
        return None

    def _diagnose(self, micro_batches: Sequence[MicroBatch]) -> str:
        """Run the step's forwards and backwards again, watched, and tell which module first made a NaN or
        Inf, and on which rank."""
        self._step.begin()
        inside = self._randomness.inside(self._step.state.step, "step")
        with watch_nonfinite(self._objective.model) as found, inside:
            self._row(micro_batches).run()
        told = self._mesh.gather_objects((self._mesh.rank, *found[:1]))
        reports = [report for report in told if len(report) > 1]
        # what another stage made spoils the gradients of those before it, and the outputs of those after
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
    """Shape and dtype of every tensor in a batch."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)
    )
