"""Where the tokens of a micro-batch lie, for all that mixes them.

Communication: none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis
from polyreme.sequence.documents import Documents, places
from polyreme.sequence.methods import Across
from polyreme.sequence.mixers import Pieces, Whole
from polyreme.sequence.parts import Balance, Parts, Work, cut, padded_length
from polyreme.sequence.visible import Rule, Tokens


@dataclass(frozen=True)
class Sharing:
    """The ranks that share sequences, and how. ranks: all of them. ring: over which keys and values meet
    queries, or are gathered (`gathers`). heads: those that share the tokens of one place on `ring`, of which
    each has some heads meanwhile. split: ranks that divide a rank's tokens once more outside of attention."""

    ranks: Axis
    ring: Axis
    heads: Axis
    gathers: bool
    split: int
    balance: Balance | Literal["auto"]


@dataclass
class Layout:
    """Where the tokens of a micro-batch lie. parts: of each rank. places: of each place on the ring, and
    tokens: these themselves. documents: of all tokens, (samples, tokens), those of padding apart. positions:
    in the model, of all tokens. longest: the largest of them. across: what attentions need, by their rule and
    chunks."""

    sharing: Sharing
    parts: Parts
    places: Parts
    tokens: list[Tokens]
    documents: Tensor
    positions: Tensor
    longest: Tensor
    across: dict[tuple[Rule, int | None], Across] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Documents, sharing: Sharing, work: Work) -> Layout:
        """Return it for the documents of a batch, with the tokens of padding in a document of their own."""
        count, length = found.of.shape
        padded = padded_length(length, sharing.ranks.size, sharing.split)
        extra = padded - length
        of, seen = found.of, found.seen
        if extra:
            of = torch.cat([of, (of[:, -1:] + 1).expand(count, extra)], 1)
            seen = torch.cat([seen, torch.ones(count, extra, dtype=torch.bool)], 1)
        places = cut(of, sharing.ring.size, sharing.balance, work)
        keys = of.masked_fill(~seen, -1)
        tokens = [
            Tokens(places.order[:, place], places.mine(of, place), places.mine(keys, place))
            for place in range(sharing.ring.size)
        ]
        positions = torch.cat([found.positions, torch.arange(extra).expand(count, extra)], 1)
        parts = places.split(sharing.heads.size)
        return cls(sharing, parts, places, tokens, 2 * of + ~seen, positions, found.positions.max())

    @property
    def length(self) -> int:
        """The tokens of a rank, of each sample."""
        return self.parts.order.shape[2]

    def part(self, value: Tensor) -> Tensor:
        """Return this rank's part of a tensor of (samples, padded tokens, ...), or of the positions in
        images, (..., samples, padded tokens); any other one as it is."""
        shape = self.documents.shape
        if value.shape[:2] == shape:
            return self.parts.mine(value, self.sharing.ranks.rank)
        if value.shape[-2:] == shape:
            rows = torch.arange(shape[0])[:, None]
            return value[..., rows, self.parts.order[:, self.sharing.ranks.rank]]
        return value

    def free(self) -> None:
        """Drop what attentions made of this, on the device too; it is made again where one asks."""
        self.across.clear()
        for each in self.tokens:
            each.moved.clear()

    @cached_property
    def place(self) -> Tensor:
        """The place of each token of all ranks in its document, from its first that is no padding."""
        return places(self.documents)

    @cached_property
    def whole(self) -> Whole:
        """What a mixer needs to get whole documents."""
        mine = self.parts.order[:, self.sharing.ranks.rank]
        return Whole(self.sharing.ranks, self.parts, Pieces.of(self.documents, mine))

    def of_rule(self, rule: Rule, chunk: int | None) -> Across:
        """Return what an attention needs, whose queries see the keys of their chunk of so many tokens."""
        if (rule, chunk) not in self.across:
            tokens = self.tokens if chunk is None else self._chunks(chunk)
            by = self.sharing
            self.across[rule, chunk] = Across(by.ring, tokens, rule, by.heads, by.gathers)
        return self.across[rule, chunk]

    def _chunks(self, chunk: int) -> list[Tokens]:
        """Return the tokens of all places with chunks for documents."""
        found = []
        for place, tokens in enumerate(self.tokens):
            number = self.places.mine(self.place // chunk, place)
            number = number + tokens.document * (self.parts.padded // chunk + 1)
            keys = number.masked_fill(tokens.key < 0, -1)
            found.append(replace(tokens, document=number, key=keys, moved={}))
        return found
