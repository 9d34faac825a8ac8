"""How a model's attention is brought together over ranks, and what of a model stands against it.

Communication: none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.config.schema import ContextSection
from polyreme.errors import ConfigError, Problem
from polyreme.models.attention import AttentionFacts, Obstacle, facts_of, obstacles
from polyreme.sequence.methods import Method, repeats


@dataclass(frozen=True)
class Choice:
    """The way that attention is computed, and why it was chosen. ulysses: neighbours that swap heads. ring:
    groups of them over which keys and values meet queries. sent: how often a rank sends as many elements as
    its keys have in a step, between hosts where there are several; 0 where that does not choose."""

    method: Method
    reason: str
    ulysses: int
    ring: int
    sent: float = 0.0

    def __str__(self) -> str:
        return f"{self.ulysses} ulysses x {self.ring} ring" if self.method == "mix" else self.method


def neighbours(host_of: Sequence[str], lines: Sequence[Sequence[int]]) -> int:
    """Return how many ranks of each of these lines are on one host, one after the other; all where that
    differs."""
    sizes = {len([*ranks]) for line in lines for _, ranks in groupby(host_of[rank] for rank in line)}
    return sizes.pop() if len(sizes) == 1 else len(lines[0])


def choose(
    section: ContextSection, facts: AttentionFacts, cp: int, tp: int, local: int | None = None
) -> Choice:
    """Return the way for a model whose heads `tp` ranks divide first. local: neighbours that are on one host;
    by default all."""
    if cp == 1 and section.method == "auto":
        return Choice("ring", "each rank has whole sequences, and keeps their documents apart", 1, 1)
    heads, shared, local = facts.heads // tp, max(1, facts.key_heads // tp), local or cp
    given = section.method
    ways: dict[Method, tuple[int, int]] = {"ring": (1, cp), "ulysses": (cp, 1), "mix": (local, cp // local)}
    if isinstance(given, Mapping):
        ways["mix"] = given.get("ulysses", 1), given.get("ring", 1)
    elif not 1 < local < cp:
        del ways["mix"]
    sent = {name: times_sent(heads, shared, *way, local) for name, way in ways.items() if heads % way[0] == 0}
    best: Method = "mix"
    if not isinstance(given, Mapping):
        best = min(sent, key=lambda name: sent[name]) if given == "auto" else given
    why = ["context.method says so"] * (given != "auto")
    if best in sent:
        where, at = (f" between hosts with {local} of the ranks each", 0) if local < cp else ("", 1)
        others = [f", {name} {each[at]:.3g} times" for name, each in sent.items() if name != best]
        why.append(f"it sends {sent[best][at]:.3g} times a rank's keys{where} in a step{''.join(others)}")
    if "ulysses" not in sent:
        why.append(f"{cp} ranks do not divide the {heads} heads of a rank, as ulysses needs")
    if given == "auto":
        why.append("gather where documents are so short that it sends at most half of that")
    return Choice(best, "; ".join(why), *ways.get(best, (1, cp)), sent[best][at] if given == "auto" else 0.0)


def times_sent(heads: int, shared: int, ulysses: int, ring: int, local: int) -> tuple[float, float]:
    """Return how often a rank sends as many elements as its keys have, forward and backward: to other hosts,
    as a mean over the ranks of a host, and in all."""
    times, cp = repeats(heads, shared, ulysses), ulysses * ring
    swapped, round_ = 4 * (heads / shared + times) / ulysses, 6 * (ring - 1) * times
    leaving = min(ulysses, local) / local  # of the ranks of a host, those whose next in the ring is elsewhere
    between = swapped * max(0, ulysses - local) + round_ * leaving * (cp > local)
    return between, swapped * (ulysses - 1) + round_


def times_gathered(documents: Tensor, ranks: int, window: int | None) -> float:
    """Return how often a rank sends as many elements as its keys have, forward and backward, where each rank
    gathers what its contiguous part needs. documents: of each token, (samples, tokens)."""
    place, ends = torch.arange(documents.shape[1]), torch.ones_like(documents, dtype=torch.bool)
    ends[:, :-1] = documents[:, 1:] != documents[:, :-1]
    last = torch.where(ends, place, len(place)).flip(1).cummin(1).values.flip(1)
    if window is not None:
        last = last.minimum(place + window - 1)
    each = len(place) // ranks
    return 6 * float((last // each - place // each).amax(0).sum()) / len(place)


def refuse(model: nn.Module, section: ContextSection, cp: int, tp: int, own_loss: bool) -> None:
    """Raise ConfigError with all that stands against dividing the sequences of a model over `cp` ranks, or,
    on one, against keeping their documents apart."""
    asked: tuple[str, Any, str] = ("data.pack", True, "data.pack = false")
    if cp > 1:
        asked = ("mesh.cp", cp, "mesh.cp = 1")
    elif section.method != "auto":
        asked = ("context.method", section.method, 'context.method = "auto"')
    key, value, off = asked
    found = [Problem(key, value, each.reason, each.fix) for each in _against(model, own_loss, off)]
    if not found:
        heads, method = facts_of(model).heads // tp, section.method
        each = method.get("ulysses", 1) if isinstance(method, Mapping) else cp if method == "ulysses" else 1
        if heads % each:
            reason = f"{each} ranks get some heads each, and {each} does not divide the {heads} of a rank"
            found.append(Problem("context.method", method, reason, 'write context.method = "ring" or "auto"'))
    if found:
        raise ConfigError(found)


def _against(model: nn.Module, own_loss: bool, off: str) -> Iterator[Obstacle]:
    if not own_loss:
        yield Obstacle(
            "a loss_fn gets the output of a part of each sequence, of which it cannot shift the labels",
            f"leave loss_fn out, so that the model's own loss counts, or write {off}",
        )
    yield from obstacles(model, off)
