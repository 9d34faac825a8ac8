"""Which keys a query sees: those of its document, before it, within a window.

Communication: none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

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


Range = tuple[int, int, int, int, int, int]
"""Of a tile: the least and largest place, the least and largest document of its queries, and of its keys."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of one rank, or of all. place: in their sequence; document: of each as a query; key: as a key,
    -1 for padding, which none sees. Tensors of (samples, tokens). tile: tokens of a tile. stretches: tiles
    begin and end where stretches do, and a stretch that is longer is up to `LONG` tiles in one."""

    place: Tensor
    document: Tensor
    key: Tensor
    tile: int = TILE
    stretches: bool = False
    _moved: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def tiles(self) -> list[slice]:
        """The tokens of each tile."""
        length = self.place.shape[1]
        if not self.stretches:
            return [slice(at, min(at + self.tile, length)) for at in range(0, length, self.tile)]
        found, at = list[slice](), 0
        for begin, end in pairwise([*self._begins, length]):
            if at < begin and end - at > self.tile:  # the short ones before it are a tile
                found, at = [*found, slice(at, begin)], begin
            if end - begin > self.tile:
                size = LONG * self.tile
                found += [slice(each, min(each + size, end)) for each in range(begin, end, size)]
                at = end
        return [*found, slice(at, length)] if at < length else found

    @property
    def _begins(self) -> list[int]:
        """Where stretches begin: of tokens that follow each other in one document, in all samples alike."""
        ended = torch.zeros(self.place.shape[1], dtype=torch.bool)
        for each, step in ((self.place, 1), (self.document, 0), (self.key, 0)):
            unlike = (each != each[:1]).any(0)
            ended[1:] |= (each[0].diff() != step) | unlike[1:] | unlike[:-1]
        ended[:1] = True
        return ended.nonzero().flatten().tolist()

    @cached_property
    def in_stretches(self) -> Tokens:
        """These tokens in tiles of stretches."""
        return replace(self, stretches=True)

    def at(self, index: Tensor) -> Tokens:
        """Return some of the tokens."""
        place, document, key = (each[:, index] for each in (self.place, self.document, self.key))
        return Tokens(place, document, key, self.tile)

    @cached_property
    def ranges(self) -> Sequence[Range]:
        """What each tile has."""
        found = []
        for rows in self.tiles:
            place, document, key = (each[:, rows] for each in (self.place, self.document, self.key))
            bounds = [*place.aminmax(), *document.aminmax(), *key.aminmax()]
            found.append(tuple(int(each) for each in bounds))
        return found  # type: ignore[return-value]

    @cached_property
    def consecutive(self) -> Sequence[bool]:
        """Whether the tokens of each tile are one after the other in their sequence, in all samples alike."""
        from_zero = self.place - torch.arange(self.place.shape[1])
        return [bool((from_zero[:, rows] == from_zero[0, rows.start]).all()) for rows in self.tiles]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return places, documents and keys on a device."""
        if device not in self._moved:
            self._moved[device] = (self.place.to(device), self.document.to(device), self.key.to(device))
        return self._moved[device]


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


def seen(queries: Tokens, at: int, keys: Tokens, of: int, rule: Rule, device: torch.device) -> Tensor | bool:
    """Return which keys of tile `of` each query of tile `at` sees, (samples, queries, keys); or True for all
    of them, or False for none."""
    low, high, first, last, _, _ = queries.ranges[at]
    start, stop, _, _, least, most = keys.ranges[of]
    inside = rule.mask is None
    if first > most or last < least or (rule.causal and high < start):
        return False
    if rule.window is not None:
        behind = rule.window - rule.causal  # the places that a query sees before its own
        if low - stop > behind or (not rule.causal and start - high > behind):
            return False
        inside = high - start <= behind and (rule.causal or stop - low <= behind)
    if first == last == least == most and inside and (not rule.causal or low >= stop):
        return True
    place, document, _ = (each[:, queries.tiles[at], None] for each in queries.on(device))
    other, _, key = (each[:, None, keys.tiles[of]] for each in keys.on(device))
    found = document == key
    if rule.mask is not None:
        return found & rule.mask.of(place, other)
    if rule.causal:
        found &= other <= place
    if rule.window is not None:
        found &= (place - other if rule.causal else (place - other).abs()) <= rule.window - rule.causal
    return found


def _up_to_itself(queries: Tokens, at: int, keys: Tokens, of: int, rule: Rule) -> bool:
    """Return whether each query of tile `at` sees the keys of tile `of` up to its own number in the tile, and
    no others: both have the same places of one document, and nothing but `causal` hides a key."""
    low, high, first, last, _, _ = queries.ranges[at]
    start, stop, _, _, least, most = keys.ranges[of]
    plain = rule.causal and rule.mask is None and (rule.window is None or high - low < rule.window)
    together = (low, high) == (start, stop) and first == last == least == most
    return plain and together and queries.consecutive[at] and keys.consecutive[of]


@dataclass(frozen=True)
class Pairs:
    """Queries and keys that are computed together. sees: which keys each query sees, (samples, queries,
    keys); True for all, or if `causal` for those up to its own number; False for none."""

    queries: slice
    keys: slice
    sees: Tensor | bool
    causal: bool = False


def pairs(queries: Tokens, keys: Tokens, rule: Rule, device: torch.device, joined: bool) -> Iterator[Pairs]:
    """Yield all pairs of a query and a key that it sees, a tile of queries and one of keys at a time. joined:
    tiles are of stretches, consecutive ones of keys that are seen wholly are one, and `causal` is used."""
    if joined and rule.window is None and rule.mask is None:
        queries, keys = queries.in_stretches, keys.in_stretches

    def of_tile(at: int) -> Iterator[Pairs]:
        for of, others in enumerate(keys.tiles):
            causal = joined and _up_to_itself(queries, at, keys, of, rule)
            sees = causal or seen(queries, at, keys, of, rule, device)
            yield Pairs(queries.tiles[at], others, sees, causal)

    for at, tile in enumerate(queries.tiles):
        for whole, parts in groupby(of_tile(at), lambda one: joined and one.sees is True and not one.causal):
            if whole:
                together = [each.keys for each in parts]
                yield Pairs(tile, slice(together[0].start, together[-1].stop), True)
            else:
                yield from (each for each in parts if each.sees is not False)
