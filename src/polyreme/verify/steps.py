"""Steps of the reference and of an engine, one beside the other, and what differs between them.

Invariant: a step of the reference comes before the engine's, whose tensors are compared as they come. All
ranks call alike, and know what differs first on any of them.
Communication: that of the engine; the ranks' samples once a step, and reports of what differs."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.distributed.mesh import Axis
from polyreme.engine import Engine
from polyreme.errors import ModelError, named
from polyreme.layout.mesh_axes import AXES
from polyreme.models import huggingface
from polyreme.pipeline.placeholders import StandIn
from polyreme.step.precision import AUTOCAST, DTYPES, master_dtype
from polyreme.step.totals import power_of_two
from polyreme.step.user.gradients import Gradients
from polyreme.verify import explain
from polyreme.verify.comparison import Comparison, Findings, error, first, sizes
from polyreme.verify.draws import Drawn, differing, drawing
from polyreme.verify.reference import Exact, Part, Reference, cut, joined
from polyreme.verify.report import Difference, Verdict, joined_rows

BEGIN = 1e-2
"""The error that initial weights may have, as those of a directory are rounded to its dtype."""
SENT = 30
"""How many of the first differences a rank reports to the others."""
OVERFLOWS = 64
"""How often a step is taken again for an overflow, each time with a smaller loss scale."""
BatchNorm = nn.modules.batchnorm._BatchNorm


class Steps:
    """A verification under way.

    truth: the reference in float64. plain: it in the working dtype, by which what rounding allows is
    measured; None where the engine computes in float64, too. first: what differs first, on any rank."""

    def __init__(
        self, engine: Engine, whole: nn.Module, optimizer: Any, loss_fn: Any, structure: bool
    ) -> None:
        """whole: the model as the engine was given it. structure: see `verify`."""
        self.engine, self.mesh, self.config = engine, engine.mesh, engine.config
        self._structure, self._dropped, self._rounding = structure, False, 0.0
        self.notes: list[str] = []
        self.first: Difference | None = None
        norms = [module for module in whole.modules() if isinstance(module, BatchNorm)]
        self._together = bool(norms) and self.config.batch_norm == "sync" and self.mesh.data.size > 1
        for module in (*whole.modules(), *engine.module.modules()):
            if isinstance(module, nn.RNNBase):  # whose dropout is inside of one operator
                module.dropout = 0.0
        names = {p: name for name, p in whole.named_parameters()}
        self._names = {name: names[p] for name, p in whole.named_parameters(remove_duplicate=False)}
        alone = self.config.batch_norm == "rank" or self.config.buffers == "local"
        given, working = (whole, optimizer), None if structure else copy.deepcopy((whole, optimizer))
        for module in norms:
            for buffer in module.buffers(recurse=False):
                buffer.data = buffer.double() if buffer.is_floating_point() else buffer
        name, keeper = self.config.precision.compute, self.mesh.data.rank if alone else 0
        self.truth = Reference(*given, self.config, loss_fn, keeper)
        self.plain: Reference | None = None
        self._findings = Findings(self.mesh.rank)
        if working is not None:
            compute, master, cast = DTYPES[name], master_dtype(DTYPES[name]), AUTOCAST.get(name)
            self.plain = Reference(*working, self.config, loss_fn, keeper, compute, master, cast)
            self._findings = Findings(self.mesh.rank, {}, torch.finfo(cast or compute).eps)
        self._references = [each for each in (self.truth, self.plain) if each is not None]
        rows = (self.mesh.data.rank, self.mesh.data.size) if self._together else None
        self._watched = Comparison(engine, self._findings, rows)
        self._division = engine._training.placement.division
        self._sizes = {name: getattr(self.mesh, name).size for name in AXES}

    def begin(self, compare: bool) -> None:
        """Give the references the weights and buffers that the engine begins with. compare: these are to be
        what they have."""
        begins = self.engine.state_dict(master=True)
        for at, (name, tensor) in enumerate(self.truth.weights.items() if compare else ()):
            self._findings.add("initial weights", name, error(begins[name], tensor), BEGIN, (at,))
        for each in self._references:
            each.begin(begins)

    def step(self, batch: Any, whole: Any = None) -> None:
        """Take a step by the references and by the engine, and compare them. whole: the global batch."""
        self._findings.step += 1
        shares = gathered(self.mesh.data, batch, self.mesh.device)
        if whole is not None:
            self._compare_data(shares, whole)
        parts = self._parts(shares)
        if self._findings.step == 1:
            self._look(parts)
        overflows = 0
        while self._overflows(parts, batch) and overflows < OVERFLOWS:
            overflows += 1
        if overflows or self._result.skipped:
            what = "was skipped" if self._result.skipped else "was taken again until no gradient overflowed"
            self.notes.append(
                f"step {self._findings.step} {what}, by a loss scale of {self._result.loss_scale:g}"
            )
        if self._result.skipped:
            return
        self._go_on()
        self._compare_totals()
        self._agree()
        if self.first is not None:
            self.first = replace(self.first, note=self._explained(self.first, parts))
            return
        before, tokens = self.truth.weights.copy(), sum(huggingface.count_tokens(p.batch) for p in parts)
        for each in self._references:
            with self._inside(each is self.truth) as mode:
                mode.updating = True
                each.update(self.config.batch.size, tokens)
        self._compare_weights(before)
        self._compare_buffers()
        self._agree()

    def _overflows(self, parts: Sequence[Part], batch: Any) -> bool:
        """Take a step. Return whether an overflow skipped it, of which what was found is forgotten."""
        kept = copy.deepcopy(self._findings)
        self._step_of_references(parts)
        self._step_of_engine(batch)
        if overflows := bool(self._result.skipped and self.truth.weight):
            vars(self._findings).update(vars(kept))
        return overflows

    def _go_on(self) -> None:
        """Have norm and update be judged given the run's own gradients, once these are as right as their
        dtype allows: the rounding of a tiny one decides a whole step of Adam's."""
        measured, wrong = self._findings.measured, [each.direction for each in self._findings.different]
        if measured is None or not self._found or "reduction" in wrong:
            return
        self._rounding = max(torch.finfo(each.dtype).eps for each in self._found.values())
        measured["norm", ""] = self._rounding
        for each in self._references:
            each.go_on_with(self._found)

    @contextlib.contextmanager
    def _inside(self, wide: bool) -> Any:
        """Context of what is computed without dropout. wide: in float64."""
        with Exact(wide) as mode:
            yield mode
        self._dropped |= mode.dropped

    def _parts(self, shares: Sequence[Any]) -> list[Part]:
        """Return the forwards of the reference for the shares of a global batch."""
        count = self.config.accumulation
        each = [cut(share, count) for share in shares]
        if not self._together:
            return [Part(micro, m, d) for d, share in enumerate(each) for m, micro in enumerate(share)]
        found = [joined([share[m] for share in each]) for m in range(count)]
        if any(micro is None for micro in found):
            raise ModelError(
                'batch_norm = "sync" normalises over all ranks\' samples, but those of one micro-batch do '
                "not have one shape, so that no single forward takes them all: verify it with batches that "
                "are padded alike"
            )
        return [Part(micro, m, None) for m, micro in enumerate(found)]

    def _look(self, parts: Sequence[Part]) -> None:
        """Raise ModelError where the model draws random numbers that cannot be turned off; and note where
        its loss depends on how a batch is cut."""
        look, found = self.truth.look, []
        whole = joined([part.batch for part in parts]) if self.config.batch.mean != "ranks" else None
        with self._inside(wide=True), torch.random.fork_rng([]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                found.append(look(parts[0].batch)[0])
            each = [look(part.batch) for part in parts]
            one = math.nan if whole is None else look(whole)[0]
        if found[0] != found[1] and not math.isnan(found[0]):
            raise ModelError(
                "{} draws random numbers beside dropout (its loss was {:.6g}, then {:.6g}, for the same "
                "samples), so that no two runs of it can be compared: turn that off in the model to verify "
                "it".format(type(self.truth.model).__name__, *found)
            )
        mean = sum(loss * weight for loss, weight in each if weight) / (sum(w for _, w in each) or math.nan)
        if abs(one - mean) > 1e-6 * abs(one):
            self.notes.append(
                f"the loss of the whole batch in one forward is {one:.6g}, and the mean over its "
                f"micro-batches {mean:.6g}: it depends on how the batch is cut, and one device was taken to "
                "cut it as the ranks do"
            )

    def _step_of_references(self, parts: Sequence[Part]) -> None:
        step = self.engine._training.step
        self._backward(self.truth, parts)
        hint = step.state_dict()["hint"] or power_of_two(self.truth.weight)
        if self.plain is not None:
            self._backward(self.plain, parts, step.progress.scale.value / hint)
            self._findings.measured = measured(self.truth, self.plain)
        weights = {name: self.truth.weights[its_first] for name, its_first in self._names.items()}
        if not step.state_dict()["hint"]:  # so that all stages know it in the first step
            step.load_state_dict({**step.state_dict(), "hint": hint})
        self._watched.begin(self.truth.trace, self.truth.own, weights, hint)

    def _backward(self, reference: Reference, parts: Sequence[Part], unit: float = 1.0) -> None:
        reference.trace.clear()
        with self._inside(reference is self.truth):
            reference.backward(parts, self.mesh.data.rank, unit)

    def _step_of_engine(self, batch: Any) -> None:
        """Take the engine's step, and compare what it computes as it comes."""
        engine = self.engine
        with self._inside(self._structure) as mode:

            def compare(gradients: Gradients) -> None:
                mode.updating = True
                self._compare_gradients(gradients)

            before, engine.on_gradients = engine.on_gradients, compare
            try:
                self._result = engine.train_step(batch)
            finally:
                engine.on_gradients = before
        self._watched.compare_sums()

    # ---- results

    def _add(self, direction: str, name: str, found: float, at: float = 0.0, note: str = "") -> None:
        allowed = self._findings.allowed((direction, name))
        self._findings.add(direction, name, found, allowed, (at,), note=note)

    def _compare_data(self, shares: Sequence[Any], whole: Any) -> None:
        for rank, (found, expected) in enumerate(zip(shares, cut(whole, len(shares)), strict=True)):
            leaves = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
            off = max(error(one, other) for one, other in leaves if isinstance(one, Tensor))
            self._findings.add("data", f"data-parallel rank {rank}", off, 0.0, (rank,))

    def _compare_gradients(self, gradients: Gradients) -> None:
        """Compare the gradients that are about to be applied."""
        self._found: dict[str, Tensor] = {}
        try:
            found = gradients.whole()
        except ModelError as problem:
            self.notes.append(f"gradients were not compared: {problem}")
            return
        size = max(sizes(self.truth.gradients, lambda _: "").values(), default=0.0)
        for at, (name, gradient) in enumerate(self.truth.gradients.items()):
            self._found[name] = found[name] if name in found else torch.zeros_like(gradient)
            self._add("reduction", name, error(self._found[name], gradient, size), -at)

    def _compare_totals(self) -> None:
        truth, found = self.truth, self._result
        note = explain.loss(found.loss, truth.loss, truth.losses)
        self._add("loss", "", error(found.loss, truth.loss), note=note)
        divided = {name for name, each in self._division.parameters.items() if not each.cut.is_whole}
        note = explain.norm(found.grad_norm, truth.norm, truth.gradients, divided, self._sizes)
        self._add("norm", "", error(found.grad_norm, truth.norm), note=note)

    def _compare_weights(self, before: Mapping[str, Tensor]) -> None:
        """Compare all weights after the update, beside the size of one step of Adam's."""
        found, truth = self.engine.state_dict(master=True), self.truth
        lr, decay = truth.lr, self.config.optimizer.weight_decay
        for at, (name, weight) in enumerate(truth.weights.items()):
            if self.plain is not None and self._findings.measured is not None:
                rounded = weight + (weight - before[name]) * self._rounding
                off = max(error(each, weight, lr * ADAM) for each in (self.plain.weights[name], rounded))
                self._findings.measured["update", name] = off
            off, got = error(found[name], weight, lr * ADAM), found[name].to(weight)
            self._add("update", name, off, at, explain.update(got, weight, before[name], lr, decay))

    def _compare_buffers(self) -> None:
        """Compare the buffers that this rank's forwards have."""
        if self.config.buffers == "average":
            self.notes.append(
                'buffers were not compared: buffers = "average" has no counterpart on one device'
            )
            return
        found = dict(self.engine.module.named_buffers())
        for at, (name, buffer) in enumerate(self.truth.model.named_buffers()):
            got = found.get(name)
            if got is None or isinstance(got, StandIn) or got.shape != buffer.shape:
                continue
            if self._division.computes(name):
                eps = 4 * torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
                allowed = max(eps, self._findings.least, 0.0 if self.plain is None else BEGIN)
                self._findings.add("buffer", name, error(got, buffer), allowed, (at,))

    def compare_draws(self, batch: Any) -> None:
        """Take one more step, with dropout, and compare which ranks draw the same numbers."""
        if not self._dropped:
            return
        self._watched.close()
        found: list[Drawn] = [{}, {}]
        with drawing(self.truth.model, self.mesh.device, found[0], wide=True), torch.random.fork_rng([]):
            self.truth.gradients_of(self._parts(gathered(self.mesh.data, batch, self.mesh.device))[0])
        with drawing(self.engine.module, self.mesh.device, found[1], self._structure):
            self.engine.train_step(batch)
        compared = differing(self.mesh, self.mesh.gather_objects(found[1]), found[0])
        for at, (name, note) in enumerate(compared.items()):
            self._findings.add("random numbers", name, math.inf if note else 0.0, 0.0, (at,), note=note)
        self._agree()
        self.notes.append(
            "dropout was off to compare steps, and on to compare which ranks draw the same numbers"
        )

    # ---- what differs first

    def _agree(self) -> None:
        """Find what differs first on any rank."""
        mine = sorted(self._findings.different, key=Difference.when)
        mine = [*mine[:SENT], *[each for each in mine if first([each])][:1]]
        told: list[Any] = self.mesh.gather_objects([asdict(each) for each in mine])
        self.first = first([Difference(**each) for of in told for each in of])

    def _explained(self, found: Difference, parts: Sequence[Part]) -> str:
        """Say what a difference looks like. All ranks must call."""
        note, name, truth, share = found.note, found.name, self.truth, self._watched.sums.get(found.name)

        def of_part(part: Part) -> Tensor:
            with self._inside(wide=True):
                return truth.gradients_of(part)[name]

        if found.direction == "weight gradient" and share is not None:
            local, tp = self._division.local, self.mesh.tp
            expected, total = local(name, truth.own[name]), share.contiguous().clone()
            tp.all_reduce(total).wait()
            own = [(p, local(name, of_part(p))) for p in parts if p.data == self.mesh.data.rank]
            note = explain.gradient(share, expected, own, self._sizes, None)
            whole = self._division.parameters[name].cut.is_whole
            if not note and whole and explain.is_close(total, expected, expected):
                note = "each tensor-parallel rank has a part of it: the sum over them (tp) is missing"
        elif found.direction == "reduction" and name in self._found:
            each = [(p, of_part(p) / truth.weight) for p in parts]
            note = explain.gradient(
                self._found[name], truth.gradients[name], each, self._sizes, self.mesh.data.rank
            )
            if not note and len(self._division.parameters[name].stages) > 1:
                note = "several pipeline stages use it, and it is to be the sum of theirs (pp)"
        told: list[Any] = self.mesh.gather_objects(note)
        return told[found.rank]

    def verdict(self, mode: str) -> Verdict:
        """Return what was found, the same on every rank. All ranks must call."""
        self._watched.close()
        rows = {direction: asdict(row) for direction, row in self._findings.rows.items()}
        told: list[Any] = self.mesh.gather_objects([rows, sorted(self._findings.unknown)])
        unknown = sorted({name for _, names in told for name in names})
        if unknown and self.first is not None:
            self.notes.append(
                f"of these modules it could not be told which part a rank has: {named(unknown)}"
            )
        axes = [f"{name} {size}" for name, size in self._sizes.items() if size > 1]
        ranks = f"{self.mesh.world_size} rank{'s' * (self.mesh.world_size > 1)}"
        layout = f"{ranks} ({', '.join([*axes, f'zero.stage {self.config.zero.stage}'])})"
        compared = joined_rows([each for each, _ in told])
        return Verdict(mode, self._findings.step, layout, compared, self.first, [*dict.fromkeys(self.notes)])


ADAM = 1e6
"""The share of the learning rate below which a weight counts as rounding is 1; `error` takes a millionth."""


def measured(truth: Reference, plain: Reference) -> dict[Any, float]:
    """Return the error of plain training in the working dtype, of all that is compared before the update."""
    size = sizes(truth.trace.values, lambda key: key.kind)
    found: dict[Any, float] = {
        key: error(plain.traced(key), tensor, size[key.kind])
        for key, tensor in truth.trace.values.items()
        if key in plain.trace.values
    }
    for kind, expected, other in (
        ("weight gradient", truth.own, plain.own),
        ("reduction", truth.gradients, plain.gradients),
        ("gathered weights", truth.weights, plain.weights),
    ):
        most = max(sizes(expected, lambda _: "").values(), default=0.0)
        found |= {(kind, name): error(other[name], tensor, most) for name, tensor in expected.items()}
    found["loss", ""], found["norm", ""] = error(plain.loss, truth.loss), error(plain.norm, truth.norm)
    return found


def gathered(axis: Axis, batch: Any, device: torch.device) -> list[Any]:
    """Return every data-parallel rank's batch, in rank order, on all of them. What is no tensor is taken to
    be the same on all."""
    leaves, spec = pytree.tree_flatten(batch)
    own = {at: leaf.to(device).contiguous() for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    forms: list[Any] = axis.gather_objects([[at, list(t.shape), str(t.dtype)[6:]] for at, t in own.items()])
    found = []
    for rank, form in enumerate(forms):
        got = [*leaves]
        for at, shape, dtype in form:
            mine = (
                own[at]
                if rank == axis.rank
                else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            )
            axis.broadcast(mine, rank)
            got[at] = mine
        found.append(pytree.tree_unflatten(got, spec))
    return found
