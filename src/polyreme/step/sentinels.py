"""What a run is watched for from its own numbers: spikes of loss and norm, and parameters without a gradient.
(`replicas` compares copies of numbers, `batch.batches` the ranks' data.)

Communication: none, but where gradients have been missing in every step so far, which parameters they are
of, once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from polyreme.distributed.mesh import Mesh
from polyreme.errors import named, warn
from polyreme.zero.bucket import Bucket

WINDOW, FEWEST = 100, 16
"""The last steps that a step is compared with; none is before there are so many."""
USUAL = 1.4826
"""The standard deviation of normally distributed numbers, over their median absolute deviation."""
LEAST = 0.01
"""The least deviation, as a fraction of the median."""


class Spikes:
    """Finds losses and norms that are far beyond those of the last steps, each spike once.

    Medians of numbers and of their deviations, which a few spikes do not move: Hampel, "The Influence Curve
    and Its Role in Robust Estimation", 1974."""

    def __init__(self, limit: float | None) -> None:
        """limit: how many usual deviations above the median a spike is; None finds none."""
        self._limit = limit
        self._last: dict[str, deque[float]] = {}
        self._within: set[str] = set()

    def see(self, numbers: Mapping[str, float]) -> str:
        """Add a step's numbers. Returns those that begin a spike, as text, or ""."""
        found = []
        for name, number in numbers.items() if self._limit is not None else ():
            last = self._last.setdefault(name, deque(maxlen=WINDOW))
            if not math.isfinite(number):  # which `nonfinite` treats
                continue
            if len(last) >= FEWEST and number > (usual := median(last)) + self._most(last, usual):
                if name not in self._within:
                    found.append(f"{name} is {number:.6g}, beside {usual:.6g} in the last {len(last)} steps")
                self._within.add(name)
            else:
                self._within.discard(name)
            last.append(number)
        return " and ".join(found)

    def _most(self, last: Sequence[float], usual: float) -> float:
        deviation = median(abs(each - usual) for each in last)
        return (self._limit or 0.0) * USUAL * max(deviation, LEAST * abs(usual))


class WithoutGradient:
    """Names the trained parameters of `buckets` that have had no gradient on any rank after so many steps."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, steps: int) -> None:
        self._buckets, self._mesh, self._steps, self._left = buckets, mesh, steps, steps
        self._arrived: dict[Bucket, set[int]] = {bucket: set() for bucket in buckets}

    def see(self, missing: float, over_data: Callable[[Sequence[float]], list[float]]) -> None:
        """Count a step, in which so many gradients were missing over all ranks, which must call. `over_data`
        sums numbers over the data-parallel ranks."""
        if not self._left:
            return
        self._left = self._left - 1 if missing else 0  # none is missing: each had one
        for bucket, arrived in self._arrived.items():
            arrived |= bucket.gradients.ever_arrived
        if self._left or not missing:
            return
        places = [(b, i, slot.name) for b in self._buckets for i, slot in enumerate(b.layout.slots)]
        counts = over_data([float(i in self._arrived[b]) for b, i, _ in places])
        never = [name for (_, _, name), count in zip(places, counts, strict=True) if not count]
        tied = [name for (b, _, name), count in zip(places, counts, strict=True) if count and b.tie]
        gathered = self._mesh.gather_objects([never, tied])
        elsewhere = {name for _, theirs in gathered for name in theirs}
        if names := [*dict.fromkeys(name for own, _ in gathered for name in own if name not in elsewhere)]:
            warn(_NEVER.format(named(names), self._steps))


_NEVER = (
    "no rank has had a gradient of {} in the first {} steps: no loss depends on it. Look for a module that "
    "the forward never calls, or a detach() or no_grad() behind it; where that is meant, "
    "requires_grad_(False) before initialize() saves its gradient and optimizer states"
)
