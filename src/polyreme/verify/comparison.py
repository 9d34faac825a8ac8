"""Compares an engine's step with that of the reference, tensor by tensor as it comes, and finds what differs
first.

Invariant: results (losses, norms, gradients, weights, buffers) decide whether a run is right; what modules
computed only tells where it went wrong, as a part of an activation's gradient may be held by one rank.
Communication: none."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyreme.engine import Engine
from polyreme.layout.bucket_layout import Cut
from polyreme.models.patches import Patches
from polyreme.models.trace import Key, Trace, watch
from polyreme.pipeline.placeholders import StandIn
from polyreme.tensor.layers import is_transposed
from polyreme.tensor.vocab_parallel_loss import VocabParallelLogits
from polyreme.verify.report import BEYOND, RESULTS, TITLES, Difference, Row
from polyreme.zero.bucket import Bucket

EXACT = 1e-8
"""The error that float64 allows."""
SLACK = 4.0
"""How many times the error of plain training in the same dtype a parallel run may have, as it rounds in
another order."""
SMALL = 1e-6
"""Numbers this much smaller than the largest of their kind are compared with those, as what is left of
cancelled numbers is rounding."""
ROUNDINGS = {"loss": 0.1, "norm": 0.0, "update": 0.0}
"""The error of what rounds less than a tensor in the working dtype, as a share of one rounding: a sum over
so much that its roundings cancel out; norm and weights, which are computed in float32 from the run's own
gradients."""
_WHEN = {each: float(at) for at, each in enumerate(TITLES)}
PHASES = _WHEN | dict.fromkeys(("gathered weights", "input"), _WHEN["forward"])
"""What comes first in a step; the forward's in the order of modules."""


def sizes(values: Mapping[Any, Tensor], kind: Callable[[Any], str] = str) -> dict[str, float]:
    """Return the size that numbers of each kind have: of the tensor with the largest ones the root of their
    mean square. kind: that of a key."""
    found: dict[str, float] = defaultdict(float)
    for key, tensor in values.items():
        if tensor.numel() and tensor.is_floating_point():
            found[kind(key)] = max(found[kind(key)], float(tensor.double().square().mean().sqrt()))
    return found


def error(found: Tensor | float, expected: Tensor | float, size: float = 0.0) -> float:
    """Return how far `found` is from `expected`, as a share of the norm of the latter. size: that of numbers
    of their kind."""
    one, other = torch.as_tensor(found).detach(), torch.as_tensor(expected)
    if one.shape != other.shape:
        return math.inf
    if not one.dtype.is_floating_point:
        return 0.0 if torch.equal(one, other.to(one.device)) else math.inf
    one, other = one.double(), other.double().to(one.device)
    same = (one == other) | (one.isnan() & other.isnan())  # masks have infinities
    off = float(torch.where(same, 0.0, one - other).norm())
    norm = float(torch.where(other.isfinite(), other, 0.0).norm())
    norm = max(norm, SMALL * size * math.sqrt(one.numel()))
    return 0.0 if off == 0.0 else off / norm if norm and math.isfinite(off) else math.inf


@dataclass
class Findings:
    """Everything that this rank found so far. measured: the error of plain training in the working dtype, of
    each tensor; None: everything is in float64. least: one rounding. unknown: modules whose activations could
    not be compared."""

    rank: int
    measured: dict[Any, float] | None = None
    least: float = EXACT
    step: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    different: list[Difference] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def allowed(self, key: Any) -> float:
        """Return the error that the tensor `key` may have."""
        if self.measured is None:
            return self.least
        found = self.measured.get(key, 0.0)
        least = max(self.least * ROUNDINGS.get(key[0], 1.0), min(self.least, torch.finfo(torch.float32).eps))
        return SLACK * max(found if math.isfinite(found) else 0.0, least)

    def add(
        self,
        direction: str,
        name: str,
        found: float,
        allowed: float,
        order: Sequence[float] = (),
        micro: int | None = None,
        note: str = "",
    ) -> None:
        """Note a comparison. order: of several of one direction."""
        row = self.rows.setdefault(direction, Row(TITLES[direction]))
        row.compared += 1
        found = min(found, BEYOND)
        if row.compared == 1 or found * row.allowed > row.error * allowed:
            row.error, row.allowed, row.name = found, allowed, name
        if not found <= allowed:
            place = [PHASES[direction], *order, *(0.0,) * (3 - len(order)), micro or 0, self.rank]
            self.different.append(
                Difference(self.step, direction, name, self.rank, micro, found, allowed, note, place)
            )


def first(different: Sequence[Difference]) -> Difference | None:
    """Return what differs first, if results differ in that step."""
    steps = [each.step for each in different if each.direction in RESULTS]
    return min(
        (each for each in different if steps and each.step == min(steps)), key=Difference.when, default=None
    )


class Comparison:
    """Watches the modules of an engine's model in a step, and the gradients that are reduced. sums: the
    gradients of this rank's sum of losses, as they were before that."""

    def __init__(self, engine: Engine, findings: Findings, rows: tuple[int, int] | None) -> None:
        """rows: this rank's place among those whose samples one forward of the reference has, or None."""
        self._training, self._rows = engine._training, rows
        self._tp, self._cp = engine.mesh.tp, engine.mesh.cp
        self._division, self._pp = self._training.placement.division, engine.mesh.pp
        self._findings, self._patches = findings, Patches()
        self._modules = dict(engine.module.named_modules())
        self._cuts = {  # in what they return; row layers are divided in what they are given
            layer: each.cut
            for name, each in self._division.parameters.items()
            for layer, _, own in [name.rpartition(".")]
            if own == "weight"
            and not each.cut.is_whole
            and each.cut.dim == (1 if is_transposed(self._modules[layer]) else 0)
        }
        self._stages = {name: self._stages_of(name) for name in self._modules}
        names = {name for name, stages in self._stages.items() if stages}
        watch(
            engine.module,
            functools.partial(self._forward, "input"),
            functools.partial(self._forward, "output"),
            self._patches,
            names,
        )
        self._training.reducer.before = self._before_reduction

    def begin(
        self, trace: Trace, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], hint: float
    ) -> None:
        """Begin a step. own: the gradients of this data-parallel rank's sum of losses. weights: those of the
        reference, by each of their names. hint: what the engine divides losses by in the step."""
        self._trace, self._own, self._weights = trace, own, weights
        self._unit = self._training.step.progress.scale.value / hint  # of gradients
        self._sizes = sizes(trace.values, lambda key: key.kind)
        self.sums: dict[str, Tensor] = {}
        self._seen: set[str] = set()
        self._calls: Counter[tuple[int, int, str]] = Counter()

    def close(self) -> None:
        """Watch no more."""
        self._patches.undo()
        self._training.reducer.before = None

    def _stages_of(self, name: str) -> set[int]:
        """Return the stages of this rank that run all of a module; one without parameters is run with what
        is around it."""
        mine, known = {*self._training.pipeline.mine}, self._division.parameters
        while self._pp.size > 1 and name and not any(f"{each}.".startswith(f"{name}.") for each in known):
            name = name.rpartition(".")[0]
        of = [{*each.stages} for full, each in known.items() if f"{full}.".startswith(f"{name}.")]
        return mine if self._pp.size == 1 else mine.intersection(*of) if name else set()

    def _forward(self, kind: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Compare tensors of a forward; and their gradients, when they come."""
        stage, micro = self._training.blocks.place
        self._calls[stage, micro, name] += kind == "input"
        if stage not in self._stages[name]:
            return
        for place, tensor in tensors.items():
            key = Key(micro, kind, name, self._calls[stage, micro, name] - 1, place)
            if isinstance(tensor, StandIn) or key not in self._trace.values:
                continue
            if self._cp.size > 1 and not (tensor.dim() and (name or kind == "output")):
                continue  # a loss of this rank's labels, and a batch whose labels are shifted
            at, cut = self._trace.order[key], self._cuts.get(name) if kind == "output" else None
            if isinstance(tensor, VocabParallelLogits):
                cut, tensor = tensor.cut, tensor.shard
            if kind == "input" and not micro and name not in self._seen:
                self._compare_weights(name, at - 0.5)
            self._compare("forward" if kind == "output" else "input", key, tensor, cut, (at,))
            if tensor.requires_grad:
                tensor.register_hook(self._gradient(key._replace(kind=f"{kind} gradient"), cut))

    def _gradient(self, key: Key, cut: Cut | None) -> Callable[[Tensor], None]:
        def compare(gradient: Tensor) -> None:
            if key in self._trace.values:
                # of the modules with this tensor the innermost one that was given it is to be named
                order = self._trace.first_of(key), key.kind == "output gradient", -key.module.count(".")
                with torch._C.DisableTorchFunction():
                    found = gradient.double() * ((self._training.reducer.factor or 1.0) / self._unit)
                    self._compare("input gradient", key, found, cut, order)

        return compare

    def _compare(
        self, direction: str, key: Key, found: Tensor, cut: Cut | None, order: Sequence[float]
    ) -> None:
        whole = self._tokens(self._trace.values[key], found, key.micro)
        expected = self._part(whole, found.shape, cut, direction == "input gradient")
        if expected is None:
            self._findings.unknown.add(key.module)
            return
        note = "of what it returned" if key.kind == "output gradient" else ""
        off, allowed = error(found, expected, self._sizes[key.kind]), self._findings.allowed(key)
        self._findings.add(direction, key.module, off, allowed, order, key.micro, note)

    def _tokens(self, whole: Tensor, found: Tensor, micro: int) -> Tensor:
        """Return an activation of this rank's tokens of each sequence, that of padding as it was found."""
        if self._cp.size == 1 or whole.dim() < 2 or whole.dim() != found.dim():
            return whole
        sequences = self._training.context.sequences
        assert sequences is not None
        parts = sequences._layouts[micro].parts
        order, length = parts.order[:, self._cp.rank].to(whole.device), whole.shape[1]
        if (
            whole.shape[0] not in (1, len(order))
            or not 0 <= parts.padded - length < self._cp.size * self._tp.size
        ):
            return whole
        rows = torch.arange(len(order), device=whole.device)[:, None]
        mine = whole.expand(len(order), *whole.shape[1:])[rows, order.clamp(max=length - 1)]
        padding = (order >= length).view(*order.shape, *(1,) * (mine.dim() - 2))
        return torch.where(padding, found.to(mine), mine) if mine.shape == found.shape else mine

    def _part(self, whole: Tensor, shape: Sequence[int], cut: Cut | None, gradient: bool) -> Tensor | None:
        """Return this rank's part of an activation, by its shape and the division of the layer that returned
        it; None where that cannot be told, or several ranks have shares of that part's gradient."""
        if self._rows is not None and whole.dim() and whole.shape[0] != shape[0]:
            whole = whole.chunk(self._rows[1])[self._rows[0]]
        rank, size = self._tp.rank, self._tp.size
        if whole.shape == shape or whole.dim() != len(shape):
            return whole if whole.shape == shape else None
        if cut is not None and whole.shape[-1] == cut.shape[cut.dim]:
            whole = torch.cat([whole[..., start:stop] for start, stop in cut.pieces[rank]], -1)
            pieces = [piece for held in cut.pieces for piece in held]
            return None if whole.shape != shape or (gradient and len({*pieces}) < len(pieces)) else whole
        for dim, mine in enumerate(shape):
            parts = whole.shape[dim] // max(mine, 1)
            if parts * mine != whole.shape[dim] or size % parts or (gradient and 1 < parts < size):
                return None
            whole = whole.narrow(dim, rank * parts // size * mine, mine)
        return whole

    def _compare_weights(self, name: str, order: float) -> None:
        """Compare the weights that a module has in its first forward of a step."""
        self._seen.add(name)
        for own, parameter in self._modules[name]._parameters.items():
            full = f"{name}.{own}".lstrip(".")
            if parameter is None or full not in self._weights or isinstance(parameter, StandIn):
                continue
            expected = self._division.local(full, self._weights[full]).to(parameter.dtype)
            allowed = self._findings.allowed(("gathered weights", full))
            self._findings.add("gathered weights", full, error(parameter, expected), allowed, (order,), 0)

    def _before_reduction(self, bucket: Bucket) -> None:
        """Add up gradients that are about to be reduced."""
        bucket.gradients.take_back()
        for index, (names, _) in enumerate(self._training.placement.named(bucket)):
            found = bucket.gradients.so_far(index)
            if bucket.tie is not None or names[0] not in self._weights:
                continue
            if self._cp.size > 1:  # all of its ranks add one up
                full = self._division.local(names[0], self._weights[names[0]])
                found = torch.zeros_like(full) if found is None else found.to(full, copy=True)
                self._cp.all_reduce(found).wait()
            if found is not None:
                found = found.double() / self._unit
                self.sums[names[0]] = self.sums[names[0]] + found if names[0] in self.sums else found

    def compare_sums(self) -> None:
        """Compare the gradients before their reduction, once all are reduced."""
        names, size = list(self._own), max(sizes(self._own, lambda _: "").values(), default=0.0)
        for name, found in self.sums.items() if self._rows is None else ():
            if name in self._own:
                off = error(found, self._division.local(name, self._own[name]), size)
                allowed = self._findings.allowed(("weight gradient", name))
                self._findings.add("weight gradient", name, off, allowed, (-names.index(name),))
