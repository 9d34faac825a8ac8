"""Totals over the micro-batches of one step, on this rank and over all of them.

Invariant: losses and gradients are sums until the end of the step, then divided by the weight (labels, or
samples) of the whole global batch; meanwhile they are divided by a power of two near it, `hint`, which costs
no digit. So a step does not depend on how its batch was split.
Communication: one small all-reduce for each axis a step. Loss, weight, tokens and samples come from the ranks
of the last pipeline stage, one of each tensor-parallel group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.optim.options import Options
from polyreme.step.batch.batches import Batching
from polyreme.step.like_options import compare, fingerprint
from polyreme.step.precision import norm_of
from polyreme.step.replicas import Replicas
from polyreme.step.sentinels import WithoutGradient


@dataclass(frozen=True)
class Totals:
    """Sums of a step over the ranks."""

    squares: float = 0.0
    loss: float = 0.0
    weight: float = 0.0
    missing: float = 0.0
    """Gradients of parameters that did not arrive, each counted on its rank."""
    tokens: float = 0.0
    hint: float = 0.0
    stop: float = 0.0
    """Ranks that were asked to stop."""
    unsaved: float = 0.0
    """Ranks whose checkpoint failed."""
    unseen: float = 0.0
    """Micro-batches whose loss value is not known."""
    buffers: float = 0.0
    """Ranks whose forwards changed buffers, as `Buffers` reports."""
    samples: float = 0.0
    written: float = 0.0
    """Ranks whose parameters were written to from outside."""
    differ: float = 0.0
    """Not 0 where ranks have other numbers in what they should have copies of."""

    @property
    def mean_loss(self) -> float:
        """The loss of the global batch; NaN where a loss is not known, or nothing has a label."""
        return self.loss / self.weight if self.weight and not self.unseen else math.nan

    @property
    def is_finite(self) -> bool:
        """True if neither a loss nor a gradient is NaN or Inf."""
        return math.isfinite(self.squares) and math.isfinite(self.loss)


@dataclass
class Flags:
    """Flags that one rank sends to all with a step's totals. Each may be set at any time."""

    stop: bool = False
    """True if this rank was asked to stop."""
    unsaved: bool = False
    """True if a checkpoint that this rank was writing failed."""


class StepSums:
    """The sums of the step under way."""

    def __init__(
        self,
        mesh: Mesh,
        factor: float,
        options: Options,
        over_ranks: bool = False,
        replicas: Replicas | None = None,
        gradients: WithoutGradient | None = None,
    ) -> None:
        """`factor`: the factor of this rank's loss, tokens and samples in the totals; nonzero on one of the
        ranks that compute the same samples. `options`: the optimizer's. `over_ranks`: sums are divided by the
        number of data-parallel ranks instead of the counted weights. `replicas`: whose digests are added
        up with the totals. `gradients`: names parameters that never have one."""
        self._replicas, self._gradients, self.options = replicas, gradients, options
        self.mesh, self._factor, self._over_ranks = mesh, factor, over_ranks
        self.device = mesh.device if mesh.has_numbers else torch.device("cpu")
        self.hint = 0.0
        """A power of two near the weight of a global batch; 0 before the first."""
        self.totals = Totals()
        """The totals of the last step that was reduced."""
        self.clear()

    def clear(self) -> None:
        """Reset the sums for a new step."""
        # kept on the device, as reading it would wait
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._weight = self._tokens = self._samples = 0.0
        self._unseen = 0

    def limit(self, backwards: int, batching: Batching) -> str:
        """Return advice for a backward too many: how many micro-batches a step has, and what to write for
        more. `backwards`: those that the step has had."""
        micro, share = batching.micro, batching.share
        each = int(self._samples) // max(backwards, 1)
        fits = 0 < each < micro and share % each == 0
        way = f"batch.micro = {each}, by which it has {share // each}" if fits else "a smaller batch.micro"
        has = f"{batching.accumulation} micro-batch{'es' * (batching.accumulation > 1)}"
        return f"a step has {has} (batch.micro = {micro}): for more backwards a step write {way}"

    def count(self, weight: float, tokens: float, samples: float, microbatches: int) -> None:
        """Count a micro-batch of a step of `microbatches`. In the very first step, all data-parallel ranks
        must call."""
        if not self.hint:
            self.hint = power_of_two(self.over_data([weight * microbatches])[0])
        self._weight += weight
        self._tokens += tokens
        self._samples += samples

    def count_elsewhere(self, weight: float, tokens: float, samples: float) -> None:
        """Count a micro-batch whose loss another rank has, in its place."""
        self.hint = self.hint or 1.0
        self.count(weight, tokens, samples, 1)
        self._unseen += 1

    def add_loss(self, loss_sum: Tensor | None) -> None:
        """Add the sum of a micro-batch's losses; None: not known."""
        if loss_sum is None or loss_sum.is_meta:
            self._unseen += 1
        else:
            self._loss = self._loss + loss_sum.detach().double()

    def reduce(
        self,
        squares: Tensor,
        missing: int,
        flags: Flags,
        news: bool,
        written: Tensor,
        progress: Mapping[str, float],
    ) -> None:
        """Compute the totals over all ranks, which all must call.

        squares: of this rank's gradients, a float64 scalar. missing: gradients that it did not get. news:
        whether it has news of buffers. written: 1 where its parameters were written to from outside.
        progress: of the training. Raises ModelError where that, or the optimizer's options, differ."""
        mesh, factor = self.mesh, self._factor
        of_line = factor * mesh.cp.alone()  # of what ranks of mesh.cp share, each has all
        own = [
            self._weight * factor,
            missing,
            self._tokens * of_line,
            self.hint * factor * mesh.loss.alone(),
            float(flags.stop),
            float(flags.unsaved),
            float(self._unseen),
            float(news),
            self._samples * of_line,
        ]
        counts = torch.tensor(own, dtype=torch.float64, device=self.device)
        of_options = fingerprint(self.options, progress) if mesh.world_size > 1 else 0.0
        alike = torch.tensor([of_options, of_options**2], dtype=torch.float64, device=self.device)
        sums = torch.stack([squares.to(self.device), self._loss * factor])
        last = [written] if self._replicas is None else [written, self._replicas.digest().to(self.device)]
        totals = torch.cat([alike, sums, counts, torch.stack(last)])
        mesh.loss.all_reduce(totals).wait()
        mesh.axis("tp", "pp").all_reduce(totals).wait()
        total, of_squares, *summed = totals.tolist()
        if total**2 != of_squares * mesh.world_size:  # exact: whole numbers below 2^53
            compare(self.options, progress, mesh)
        self.totals = Totals(*summed)
        if self._over_ranks and self.totals.weight:
            self.totals = replace(self.totals, weight=float(mesh.loss.size))

    def check(self) -> None:
        """Check the step by its totals, once buffers and a script's writes are shared. All ranks must call.
        Raises ModelError for copies of numbers that differ."""
        if self._replicas is not None and self.totals.differ:
            self._replicas.compare()
        if self._gradients is not None:
            self._gradients.see(self.totals.missing, self.over_data)

    def measure(self, squares: Tensor) -> None:
        """Replace the total of the squares of gradients. `squares` are this rank's."""
        total = squares.to(self.device).reshape(1)
        self.mesh.world.all_reduce(total).wait()
        self.totals = replace(self.totals, squares=total.item())

    def to_mean(self, loss_scale: float) -> float:
        """Return the factor that turns reduced gradients into those of the mean over the global batch. After
        `reduce`."""
        totals = self.totals
        return totals.hint / (totals.weight * loss_scale) if totals.weight else 0.0

    def norm(self, loss_scale: float, dtype: torch.dtype) -> float:
        """Return the global norm of the mean's gradients, before clipping, in the masters' `dtype`."""
        return norm_of(self.totals.squares, self.to_mean(loss_scale), dtype)

    def mean(self, value: float) -> float:
        """Return the mean of `value` over all ranks."""
        totals = torch.tensor([value, 1.0], dtype=torch.float64, device=self.device)
        self.mesh.world.all_reduce(totals).wait()
        total, count = totals.tolist()
        return total / count

    def over_data(self, values: Sequence[float]) -> list[float]:
        """Return `values` summed over the data-parallel ranks."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.mesh.loss.all_reduce(totals).wait()
        return totals.tolist()


def power_of_two(weight: float) -> float:
    """Return the power of two nearest to `weight`, at least 1."""
    return 2.0 ** round(math.log2(max(weight, 1.0)))
