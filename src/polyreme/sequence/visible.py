"""Which keys a query sees: those of its document, before it, within a window.

Communication: none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

TILE = 1024
"""Queries, and keys, whose scores are computed together."""
LONG = 8
"""So many of these are a tile of a kernel that holds no scores, where all are seen in the same way."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees, by the places of both in their sequence: a bool tensor of (samples or 1, 1,
    queries, keys). Masks of the same tensor are equal."""

    sees: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and other.sees is self.sees

    def __hash__(self) -> int:
        return id(self.sees)

    def of(self, place: Tensor, other: Tensor) -> Tensor:
        """Return what queries at `place`, (samples, queries, 1), see of keys at `other`, (samples, 1,
        keys)."""
        sees = self.sees[:, 0].expand(len(place), -1, -1)
        return sees[torch.arange(len(place), device=place.device)[:, None, None], place, other]


@dataclass(frozen=True)
class Rule:
    """How scores are made, and which keys of its document a query sees: causal: none after it. window: so
    many, counted back from it, with itself; without `causal`, so far on both sides. softcap: scores are
    bent to stay below it. mask: those that it says alone, whatever `causal` and `window` say."""

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    mask: Mask | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens of one rank, or of all. place: in their sequence; document: of each as a query; key: as a key,
    -1 for padding, which none sees. Tensors of (samples, tokens). tile: the most tokens of a tile; stretch:
    those of one that has a single stretch of a document, alike in all samples, where they may be more. moved:
    copies on devices."""

    place: Tensor
    document: Tensor
    key: Tensor
    tile: int = TILE
    stretch: int | None = None
    moved: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def tiles(self) -> list[slice]:
        """The tokens of each tile: of one stretch of a document, so that few pairs need a mask; of several
        where they are short."""
        length = self.place.shape[1]
        stretches = (self.document, self.key, self.place - torch.arange(length))
        ends = torch.stack([each.diff() != 0 for each in stretches]).any(0).any(0).nonzero().squeeze(1) + 1
        found, start = list[slice](), 0
        for begin, end in pairwise([0, *ends.tolist(), length]):
            if start < begin and end - begin >= self.tile // 4:
                found.append(slice(start, begin))
                start = begin
            if end - start >= self.tile // 4 or end == length:
                size = self.tile
                if start == begin < end and all((one[:, start] == one[0, start]).all() for one in stretches):
                    size = self.stretch or size
                found += (slice(at, min(at + size, end)) for at in range(start, end, size))
                start = end
        return found

    @cached_property
    def in_stretches(self) -> Tokens:
        """These tokens, in longer tiles where all of a tile is seen in the same way."""
        return replace(self, stretch=LONG * self.tile)

    def at(self, index: Tensor) -> Tokens:
        """Return some of the tokens."""
        place, document, key = (each[:, index] for each in (self.place, self.document, self.key))
        return Tokens(place, document, key, self.tile)

    @cached_property
    def ranges(self) -> Tensor:
        """The least and largest place, document of queries, and document of keys, (6, tiles)."""
        each = (self.place, self.document, self.key)
        bounds = [[bound for one in each for bound in one[:, rows].aminmax()] for rows in self.tiles]
        return torch.tensor(bounds, dtype=torch.long).view(-1, 6).T

    @cached_property
    def consecutive(self) -> Tensor:
        """Whether the tokens of each tile are one after the other in their sequence, in all samples alike."""
        from_zero = self.place - torch.arange(self.place.shape[1])
        alike = [(from_zero[:, rows] == from_zero[0, rows.start]).all() for rows in self.tiles]
        return torch.tensor(alike, dtype=torch.bool)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return places, documents and keys on a device."""
        if device not in self.moved:
            self.moved[device] = (self.place.to(device), self.document.to(device), self.key.to(device))
        return self.moved[device]


def reached(queries: Tokens, keys: Tokens, rule: Rule) -> Tensor:
    """Return the indices of those keys that a query of some sample may see: of its document, and not beyond
    what the first and the last of these queries see."""
    shape = len(keys.key), int(max(queries.document.max(), keys.key.max())) + 1
    last = torch.full(shape, -1).scatter_reduce(1, queries.document, queries.place, "amax")
    first = torch.full(shape, 1 << 40).scatter_reduce(1, queries.document, queries.place, "amin")
    place, of = keys.place, keys.key.clamp(min=0)
    end, begin = last.gather(1, of), first.gather(1, of)
    found = (keys.key >= 0) & (end >= 0)
    behind = None if rule.window is None else rule.window - rule.causal
    if rule.causal:
        found &= place <= end
    elif behind is not None:
        found &= place <= end + behind
    if behind is not None:
        found &= place >= begin - behind
    return found.any(0).nonzero().squeeze(1)


def _kinds(queries: Tokens, keys: Tokens, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each tile of queries with each of keys, (tiles, tiles): whether a query may see a key;
    whether all see all; and whether each sees the keys up to its own number in the tile and no others."""
    low, high, first, last, _, _ = queries.ranges[:, :, None]
    start, stop, _, _, least, most = keys.ranges
    some = (first <= most) & (least <= last)
    alone = (first == last) & (last == least) & (least == most)
    if rule.mask is not None:
        alone &= False
    alike = queries.consecutive[:, None] & keys.consecutive & (low == start) & (high == stop)
    whole, diagonal = alone.clone(), alone & alike
    if rule.causal:
        some &= start <= high
        whole &= stop <= low
    else:
        diagonal &= False
    if rule.window is not None:
        behind = rule.window - rule.causal  # the places that a query sees before its own
        some &= low - stop <= behind
        whole &= high - start <= behind
        diagonal &= high - low <= behind
        if not rule.causal:
            some &= start - high <= behind
            whole &= stop - low <= behind
    return some, whole, diagonal


def _seen(queries: Tokens, at: slice, keys: Tokens, of: slice, rule: Rule, device: torch.device) -> Tensor:
    """Return which of the keys `of` each of the queries `at` sees, (samples, queries, keys)."""
    place, document, _ = (each[:, at, None] for each in queries.on(device))
    other, _, key = (each[:, None, of] for each in keys.on(device))
    found = document == key
    if rule.mask is not None:
        return found & rule.mask.of(place, other)
    if rule.causal:
        found &= other <= place
    if rule.window is not None:
        found &= (place - other if rule.causal else (place - other).abs()) <= rule.window - rule.causal
    return found


@dataclass(frozen=True)
class Pairs:
    """Queries and keys that are computed together. sees: which keys each query sees, (samples, queries,
    keys); True for all, or if `causal` for those up to its own number."""

    queries: slice
    keys: slice
    sees: Tensor | bool
    causal: bool = False

    def joined(self, other: Pairs) -> Pairs | None:
        """Return both as one, where the same queries see all keys of both, which are consecutive."""
        all_seen = self.sees is True is other.sees and not (self.causal or other.causal)
        if all_seen and self.queries == other.queries and self.keys.stop == other.keys.start:
            return Pairs(self.queries, slice(self.keys.start, other.keys.stop), True)
        return None


def pairs(queries: Tokens, keys: Tokens, rule: Rule, device: torch.device, joined: bool) -> Iterator[Pairs]:
    """Yield all pairs of a query and a key that it sees, a tile of queries and one of keys at a time. joined:
    tiles are longer, consecutive ones of keys that are seen wholly are one, and `causal` is used."""
    if joined and rule.window is None and rule.mask is None:
        queries, keys = queries.in_stretches, keys.in_stretches

    some, whole, diagonal = _kinds(queries, keys, rule)
    kind = (torch.where(diagonal & joined, 2, whole.long())).tolist()
    last: Pairs | None = None
    for at, of in some.nonzero().tolist():
        mine, others = queries.tiles[at], keys.tiles[of]
        sees = True if kind[at][of] else _seen(queries, mine, keys, others, rule, device)
        found = Pairs(mine, others, sees, kind[at][of] > 1)
        together = last.joined(found) if last and joined else None
        if last and not together:
            yield last
        last = together or found
    if last:
        yield last
