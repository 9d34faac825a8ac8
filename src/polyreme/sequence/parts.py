"""Which tokens of a sequence each rank has: contiguous ones, or such that all ranks have as much attention to
compute.

Invariant: every rank has equally many tokens, each token lies on one rank, and a rank's are in rising order.
Sequences whose length the ranks do not divide are padded at their end.
Communication: none."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from polyreme.layout.intervals import round_up
from polyreme.sequence.documents import places

Balance = Literal["contiguous", "zigzag", "documents", "blocks"]
"""How tokens are given to ranks: in a stretch each; the i-th and the i-th last of 2n stretches; such two of
each document; or blocks of tokens by what their attention takes."""
BLOCK = 128
"""Tokens of a block, at most."""


@dataclass(frozen=True)
class Work:
    """What a rank's tokens take to compute. pair: operations of a query with a key; token: those of a token
    outside of attention. causal, window: which keys a query sees; window counts back from it, with itself."""

    pair: float = 1.0
    token: float = 0.0
    causal: bool = True
    window: int | None = None

    def of(self, documents: Tensor) -> Tensor:
        """Return what each token takes, by the document of each, (samples, tokens)."""
        place, seen = places(documents), None
        if self.causal:
            seen = place + 1
        else:
            counts = torch.zeros_like(documents).scatter_add_(1, documents, torch.ones_like(documents))
            seen = counts.gather(1, documents)
        if self.window is not None:
            seen = seen.clamp(max=self.window)
        return seen * self.pair + self.token


@dataclass(frozen=True)
class Parts:
    """The tokens of each rank: `order[s, r]` are the places, in sample s, of those of rank r. balance: how
    they were chosen. most, mean: what the rank with the most has to compute, and a rank on average."""

    order: Tensor
    balance: Balance
    most: float
    mean: float
    _inverse: list[Tensor] = field(default_factory=list)

    @property
    def load(self) -> float:
        """What the rank with the most has to compute, over the mean."""
        return self.most / self.mean if self.mean else 1.0

    @property
    def padded(self) -> int:
        """The tokens of a sample with its padding."""
        return self.order.shape[1] * self.order.shape[2]

    def mine(self, whole: Tensor, rank: int) -> Tensor:
        """Return rank `rank`'s part of a tensor of (samples, padded tokens, ...)."""
        return whole[torch.arange(len(whole))[:, None], self.order[:, rank]]

    def split(self, ranks: int) -> Parts:
        """Return the parts of so many times as many ranks, of which each takes a stretch of one of these."""
        order = self.order.unflatten(2, (ranks, -1)).flatten(1, 2)
        return Parts(order, self.balance, self.most, self.mean)

    def joined(self, parts: Tensor) -> Tensor:
        """Return the whole of the ranks' parts, (samples, ranks, tokens of a rank, ...)."""
        if not self._inverse:
            self._inverse.append(self.order.flatten(1).argsort(1))
        return parts.flatten(1, 2)[torch.arange(len(parts))[:, None], self._inverse[0]]


def padded_length(length: int, ranks: int, multiple: int = 1) -> int:
    """Return the length of sequences with their padding: what each rank gets is divided by `multiple`."""
    return round_up(length, ranks * multiple)


def cut(documents: Tensor, ranks: int, balance: Balance | Literal["auto"], work: Work) -> Parts:
    """Cut sequences over `ranks`, by the document of each token, padding included. "auto" takes what leaves
    the fullest rank the least to compute, and of equal ones the first."""
    weights = work.of(documents).double()
    tried: tuple[Balance, ...] = get_args(Balance) if balance == "auto" else (balance,)
    best: Parts | None = None
    for each in tried:
        order = torch.stack(
            [_orders(each, row, of, ranks) for row, of in zip(documents, weights, strict=True)]
        )
        by_rank = weights.gather(1, order.flatten(1)).view(order.shape).sum((0, 2))
        found = Parts(order, each, float(by_rank.max()), float(by_rank.mean()))
        if best is None or found.load < best.load - 1e-3:
            best = found
    assert best is not None
    return best


def _orders(balance: Balance, documents: Tensor, weights: Tensor, ranks: int) -> Tensor:
    """Return the places of each rank's tokens, (ranks, tokens of a rank), rising."""
    index = torch.arange(len(documents))
    if balance == "contiguous":
        return index.view(ranks, -1)
    if balance == "blocks":
        owner = _blocks(weights, ranks)
    else:
        lengths = [len(index)]
        if balance == "documents":
            lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        owner = _zigzag(lengths, ranks)
    return owner.argsort(stable=True).view(ranks, -1)


def _zigzag(lengths: list[int], ranks: int) -> Tensor:
    """Return the rank of each token where each stretch of these lengths is cut into 2n: a rank has the i-th
    and the i-th last. What is left over, at the end of each, is dealt out in stretches of equal length."""
    each = torch.cat([torch.arange(ranks), torch.arange(ranks).flip(0)])
    owners, left = [], sum(length % (2 * ranks) for length in lengths)
    dealt, share = 0, left // ranks
    for length in lengths:
        size, rest = divmod(length, 2 * ranks)
        owners += [each.repeat_interleave(size)]
        if rest:
            owners += [torch.arange(dealt, dealt + rest) // share]
            dealt += rest
    return torch.cat(owners)


def _blocks(weights: Tensor, ranks: int) -> Tensor:
    """Return the rank of each token where blocks go, the heaviest first, to the rank that has the least."""
    each = len(weights) // ranks
    size = next(n for n in range(min(BLOCK, each), 0, -1) if each % n == 0)
    heavy = weights.view(-1, size).sum(1)
    most, owner = each // size, torch.empty(len(heavy), dtype=torch.long)
    loads = [(0.0, rank, 0) for rank in range(ranks)]
    for block in heavy.argsort(descending=True, stable=True).tolist():
        load, rank, has = heapq.heappop(loads)
        owner[block] = rank
        if has + 1 < most:
            heapq.heappush(loads, (load + float(heavy[block]), rank, has + 1))
    return owner.repeat_interleave(size)
