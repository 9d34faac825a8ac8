"""What a whole job takes on more or fewer ranks, in hours and in money, and which of these is the cheapest
that is done in time.

Invariant: an offer's hours are its tokens at the speed of the plan's fastest layout; a price is that of the
cluster's description. No communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from polyreme.config import Config
from polyreme.errors import PolyremeError
from polyreme.planner.plan import Details, Plan


@dataclass(frozen=True)
class Offer:
    """A job of so many `tokens` on the ranks of `plan`. why: the reason why it cannot run there, "" if it
    can."""

    ranks: int
    plan: Plan | None
    tokens: float
    why: str = ""

    @property
    def hours(self) -> float:
        """From its first step to its last; infinite where it cannot run."""
        if self.why or self.plan is None:
            return math.inf
        return self.tokens / self.plan.details.timeline.tokens_per_second / 3600

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.hours * self.ranks

    @property
    def cost(self) -> float:
        """The price of all device hours; 0 where the cluster has none."""
        return self.device_hours * self.plan.cluster.price if self.plan is not None else math.inf


def counts(most: int) -> list[int]:
    """Return the numbers of ranks to ask for: 1 doubled up to `most`, and that."""
    return sorted({most, *(1 << times for times in range(most.bit_length()) if 1 << times <= most)})


def offers(
    plan_on: Callable[[int], Plan], config: Config, most: int, tokens: float | None = None
) -> Iterator[Offer]:
    """Yield the offer of each number of ranks up to `most`. plan_on: makes the plan. tokens: by default those
    of train.length."""
    for ranks in counts(most):
        try:
            made = plan_on(ranks)
        except PolyremeError as error:
            yield Offer(ranks, None, 0, " ".join(str(error).split()))
            continue
        why = (
            ""
            if made.fits
            else (
                made.found.failed[0].why
                + f"; {made.found.unjudged} others were not tried: --tries" * (made.found.unjudged > 0)
            )
        )
        yield Offer(ranks, made, tokens or tokens_of(config, made.details), why)


def tokens_of(config: Config, details: Details) -> float:
    """Return the tokens of a whole run of train.length."""
    length, each = config.train.length, details.traces[0].tokens
    of_each = {"tokens": 1.0, "samples": each / details.config.batch.size, "steps": each}
    return length.amount * of_each[length.unit]


def cheapest(found: Sequence[Offer], deadline: float = math.inf) -> Offer | None:
    """Return the offer of the fewest device hours among those that take `deadline` hours at most, of equal
    ones the fastest; None where none does."""
    in_time = [each for each in found if each.hours <= deadline and each.hours < math.inf]
    return min(in_time, key=lambda each: (each.device_hours, each.hours), default=None)
