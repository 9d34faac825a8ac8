"""How a model's attention is brought together over ranks, and what of a model stands against it.

Communication: none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from polyreme.config.schema import ContextSection
from polyreme.errors import ConfigError, Problem
from polyreme.models.attention import AttentionFacts, Obstacle, facts_of, obstacles
from polyreme.sequence.methods import Method


@dataclass(frozen=True)
class Choice:
    """The way that attention is computed, and why it was chosen."""

    method: Method
    reason: str


def choose(section: ContextSection, facts: AttentionFacts, cp: int, tp: int) -> Choice:
    """Return the way for a model whose heads `tp` ranks divide first."""
    if cp == 1 and section.method == "auto":
        return Choice("ring", "each rank has whole sequences, and keeps their documents apart")
    heads, shared = facts.heads // tp, max(1, facts.key_heads // tp)
    if section.method != "auto":
        return Choice(section.method, "context.method says so")
    grouped = heads / (shared if shared % cp == 0 else cp if cp % shared == 0 else heads)
    ring, ulysses = 6 * (cp - 1), 4 * (1 + grouped) * (cp - 1) / cp * (heads / grouped / shared)
    if heads % cp:
        return Choice("ring", f"{cp} ranks do not divide the {heads} heads of a rank, as ulysses needs")
    less, more = sorted([("ring", ring), ("ulysses", ulysses)], key=lambda each: each[1])
    reason = f"it sends {less[1]:.3g} times a rank's keys in a step, and {more[0]} {more[1]:.3g} times"
    return Choice("ulysses" if less[0] == "ulysses" else "ring", reason)


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
        heads = facts_of(model).heads // tp
        if section.method == "ulysses" and heads % cp:
            reason = f"it gives each of {cp} ranks some heads, and {cp} does not divide the {heads} of a rank"
            found.append(
                Problem("context.method", "ulysses", reason, 'write context.method = "ring" or "auto"')
            )
    if found:
        raise ConfigError(found)


def _against(model: nn.Module, own_loss: bool, off: str) -> Iterator[Obstacle]:
    if not own_loss:
        yield Obstacle(
            "a loss_fn gets the output of a part of each sequence, of which it cannot shift the labels",
            f"leave loss_fn out, so that the model's own loss counts, or write {off}",
        )
    yield from obstacles(model, off)
