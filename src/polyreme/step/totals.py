"""Totals over the micro-batches of one step, on this rank and over all of them.

Invariant: losses and gradients are sums until the end of the step, then divided by the weight (labels, or
samples) of the whole global batch; meanwhile they are divided by a power of two near it, `hint`, which costs
no digit. So a step does not depend on how its batch was split.
Communication: one small all-reduce for each axis a step. Loss, weight, tokens and samples come from the ranks
of the last pipeline stage, one of each tensor-parallel group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.optim.options import Options
from polyreme.placement.full_parameters import Written
from polyreme.step.batch.batches import Batching
from polyreme.step.like_options import compare, fingerprint
from polyreme.step.precision import norm_of
from polyreme.step.replicas import Replicas


@dataclass(frozen=True)
class Totals:
    """Sums over the ranks."""

    squares: float = 0.0
    loss: float = 0.0
    weight: float = 0.0
    missing: float = 0.0
    """Gradients that did not arrive."""
    tokens: float = 0.0
    hint: float = 0.0
    stop: float = 0.0
    """Ranks that were asked to stop."""
    unsaved: float = 0.0
    """Ranks whose checkpoint failed."""
    unseen: float = 0.0
    """Losses whose value is not known."""
    buffers: float = 0.0
    """Ranks that have news of buffers."""
    samples: float = 0.0
    written: float = 0.0
    """Ranks whose parameters were written to from outside."""

    @property
    def mean_loss(self) -> float:
        """The loss of the global batch; NaN where a loss is not known, or nothing has a label."""
        return self.loss / self.weight if self.weight and not self.unseen else math.nan

    @property
    def is_finite(self) -> bool:
        """Whether neither a loss nor a gradient is NaN or Inf."""
        return math.isfinite(self.squares) and math.isfinite(self.loss)


@dataclass
class Flags:
    """What one rank tells all others with a step's totals. Each may be set at any time."""

    stop: bool = False
    """Whether this rank was asked to stop."""
    unsaved: bool = False
    """Whether a checkpoint that this rank was writing failed."""


class StepSums:
    """The sums of the step under way."""

    def __init__(
        self,
        mesh: Mesh,
        tells: float,
        options: Options,
        over_ranks: bool = False,
        replicas: Replicas | None = None,
    ) -> None:
        """`tells`: how much the loss that this rank has counts; it does on one rank of each data-parallel
        one. `options`: the optimizer's. `over_ranks`: sums are divided by the number of these, not by the
        weights counted. `replicas`: what is compared then, where ranks have copies but over data
        parallelism."""
        self._replicas, self.options = replicas, options
        self.mesh, self._tells, self._over_ranks = mesh, tells, over_ranks
        self.device = mesh.device if mesh.has_numbers else torch.device("cpu")
        self.hint = 0.0
        """A power of two near the weight of a global batch; 0 before the first."""
        self.totals = Totals()
        """The totals of the last step that was reduced."""
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        # stays on the device: to read it would wait for it
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._weight = 0.0
        self._tokens = self._samples = self._unseen = 0

    def limit(self, backwards: int, batching: Batching) -> str:
        """How many backwards a step has, which had so many, and what to write for more."""
        micro, share = batching.micro, batching.share
        each = self._samples // max(backwards, 1)
        fits = 0 < each < micro and share % each == 0
        way = f"batch.micro = {each}, by which it has {share // each}" if fits else "a smaller batch.micro"
        has = f"{batching.accumulation} micro-batch{'es' * (batching.accumulation > 1)}"
        return f"a step has {has} (batch.micro = {micro}): for more backwards a step write {way}"

    def count(self, weight: float, tokens: int, samples: int, microbatches: int) -> None:
        """Add a micro-batch, of so many that a step has. In the very first, all data-parallel ranks must
        call."""
        if not self.hint:
            self.hint = power_of_two(self.over_data([weight * microbatches])[0])
        self._weight += weight
        self._tokens += tokens
        self._samples += samples

    def count_elsewhere(self, weight: float, tokens: int, samples: int) -> None:
        """Add a micro-batch whose loss another rank has, in that one's place."""
        self.hint = self.hint or 1.0
        self._weight += weight
        self._tokens += tokens
        self._samples += samples
        self._unseen += 1

    def add_loss(self, loss_sum: Tensor | None) -> None:
        """Add the sum of a micro-batch's losses; None: it is not known."""
        if loss_sum is None or loss_sum.is_meta:
            self._unseen += 1
        else:
            self._loss = self._loss + loss_sum.detach().double()

    def reduce(self, squares: Tensor, missing: int, flags: Flags, news: bool, written: Written) -> None:
        """Take the totals over all ranks, which all must call.

        squares: of this rank's gradients, a float64 scalar; missing: gradients that it did not get; news:
        whether it has news of buffers. Raises ModelError where copies of a parameter differ, or
        the optimizer's options."""
        mesh, tells = self.mesh, self._tells
        told = [
            self._weight * tells,
            missing,
            self._tokens * tells,
            self.hint * tells * mesh.loss.alone(),
            float(flags.stop),
            float(flags.unsaved),
            float(self._unseen),
            float(news),
            self._samples * tells,
            options := fingerprint(self.options) if mesh.world_size > 1 else 0.0,
            options**2,
        ]
        counts = torch.tensor(told, dtype=torch.float64, device=self.device)
        digest = written.digest(self.device)
        sums = torch.stack([squares.to(self.device), self._loss * tells])
        writes = torch.stack([written.seen(self.device), digest, digest.square()])
        drift = [] if self._replicas is None else [self._replicas.digest().to(self.device).reshape(1)]
        totals = torch.cat([*drift, sums, counts, writes])
        mesh.loss.all_reduce(totals).wait()
        total, of_squares = totals[-2:].clone()
        totals[-3] += total.square() != of_squares * mesh.loss.size  # exact: whole numbers below 2^53
        totals = totals[:-2]
        mesh.axis("tp", "pp").all_reduce(totals).wait()
        told = totals.tolist()
        of_options = told[-3], told[-2]
        del told[-3:-1]
        if of_options[0] ** 2 != of_options[1] * mesh.world_size:  # exact
            compare(self.options, mesh)
        if self._replicas is not None and told.pop(0):
            self._replicas.compare()
        self.totals = Totals(*told)
        if self._over_ranks and self.totals.weight:
            self.totals = replace(self.totals, weight=float(mesh.loss.size))

    def measure(self, squares: Tensor) -> None:
        """Take the total of the squares of gradients anew, of which this rank's are `squares`."""
        total = squares.to(self.device).reshape(1)
        self.mesh.world.all_reduce(total).wait()
        self.totals = replace(self.totals, squares=total.item())

    def to_mean(self, loss_scale: float) -> float:
        """What reduced gradients times it are those of the mean over the global batch. After `reduce`."""
        totals = self.totals
        return totals.hint / (totals.weight * loss_scale) if totals.weight else 0.0

    def norm(self, loss_scale: float, dtype: torch.dtype) -> float:
        """The global norm of the mean's gradients, before clipping, in the masters' `dtype`."""
        return norm_of(self.totals.squares, self.to_mean(loss_scale), dtype)

    def mean(self, value: float) -> float:
        """The mean of what all ranks give."""
        totals = torch.tensor([value, 1.0], dtype=torch.float64, device=self.device)
        self.mesh.world.all_reduce(totals).wait()
        total, count = totals.tolist()
        return total / count

    def over_data(self, values: Sequence[float]) -> list[float]:
        """`values` summed over the data-parallel ranks."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.mesh.loss.all_reduce(totals).wait()
        return totals.tolist()


def power_of_two(weight: float) -> float:
    """The one nearest to `weight`, at least 1."""
    return 2.0 ** round(math.log2(max(weight, 1.0)))
