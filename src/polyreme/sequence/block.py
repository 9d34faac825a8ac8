"""Attention of queries over blocks of keys, one after the other, and its gradients.

The output over several blocks is merged by their log-sum-exps (Dao et al. 2022, "FlashAttention"; Liu et al.
2023, "Ring Attention"). Scores are computed in float32, or in float64 where numbers are, a tile at a time.
Grouped heads are not repeated: the queries of a group are rows of one product.

Communication: none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme.sequence.visible import Rule, Tokens, seen


@dataclass(frozen=True)
class Merged:
    """The output over the blocks so far, (samples, heads, queries, width), and the log-sum-exp of each
    query's scores; both at least in float32."""

    output: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, query: Tensor, width: int) -> Merged:
        """Return the output over no block."""
        wide = torch.promote_types(query.dtype, torch.float32)
        return cls(
            query.new_zeros((*query.shape[:3], width), dtype=wide),
            query.new_full(query.shape[:3], -torch.inf, dtype=wide),
        )

    def add_sinks(self, sinks: Tensor) -> None:
        """Add a score for each head to every query's, of a value that is zero."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.output.mul_((self.lse - total).exp().unsqueeze(-1))
        self.lse.copy_(total)


def rows(tensor: Tensor, groups: int, tile: slice) -> Tensor:
    """Return a tile of (samples, heads, tokens, width) as (samples, key heads, tokens of all the queries'
    heads that share one, width)."""
    return tensor[:, :, tile].unflatten(1, (groups, -1)).flatten(2, 3)


def add_rows(total: Tensor, tile: slice, part: Tensor) -> None:
    """Add to a tile what `rows` gave the shape of."""
    here = total[:, :, tile]
    here += part.view(here.shape)


def _scores(query: Tensor, key: Tensor, rule: Rule, visible: Tensor | bool) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(wide) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if isinstance(visible, Tensor):
        split = scores.unflatten(2, (-1, visible.shape[1]))
        scores = split.masked_fill(~visible[:, None, None], -torch.inf).flatten(2, 3)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """Return 0 for the log-sum-exp of queries that see nothing, whose scores are all -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def attend(
    merged: Merged, query: Tensor, key: Tensor, value: Tensor, queries: Tokens, keys: Tokens, rule: Rule
) -> None:
    """Merge the attention over a block of keys and values into `merged`, in place."""
    groups = key.shape[1]
    for i, tile in enumerate(queries.tiles):
        mine = rows(query, groups, tile)
        for j, others in enumerate(keys.tiles):
            visible = seen(queries, i, keys, j, rule, query.device)
            if visible is False:
                continue
            scores = _scores(mine, key[:, :, others], rule, visible)
            before = rows(merged.lse.unsqueeze(-1), groups, tile)
            lse = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
            finite = _finite(lse)
            added = scores.sub_(finite).exp_().to(value.dtype) @ value[:, :, others]
            old = rows(merged.output, groups, tile) * (before - finite).exp()
            here = merged.output[:, :, tile]
            here.copy_((old + added).view(here.shape))
            merged.lse[:, :, tile].copy_(lse.view(here.shape[:-1]))


@dataclass(frozen=True)
class Incoming:
    """What the gradients of queries, keys and values need: the queries, the gradient of the output, its
    products with the output, and the log-sum-exps of all keys. query_grad: the sum of gradients so far."""

    query: Tensor
    grad: Tensor
    products: Tensor
    lse: Tensor
    query_grad: Tensor

    @classmethod
    def of(cls, query: Tensor, grad: Tensor, output: Tensor, lse: Tensor) -> Incoming:
        """Return it for a gradient of the merged output, of all blocks."""
        wide = lse.dtype
        grad = grad.contiguous()
        products = (grad.to(wide) * output.to(wide)).sum(-1)
        return cls(
            query, grad, products, _finite(lse), torch.zeros(query.shape, dtype=wide, device=query.device)
        )

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of the sinks."""
        share = (sinks.to(self.lse.dtype)[:, None] - self.lse).exp()
        return -(share * self.products).sum((0, 2)).to(sinks.dtype)


def differentiate(
    incoming: Incoming, key: Tensor, value: Tensor, queries: Tokens, keys: Tokens, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Add the queries' gradient of a block of keys and values to `incoming`, and return the block's own."""
    groups, wide = key.shape[1], incoming.lse.dtype
    key_grad = torch.zeros(key.shape, dtype=wide, device=key.device)
    value_grad = torch.zeros(value.shape, dtype=wide, device=value.device)
    for i, tile in enumerate(queries.tiles):
        query, grad = (rows(each, groups, tile) for each in (incoming.query, incoming.grad))
        lse, products = (rows(each.unsqueeze(-1), groups, tile) for each in (incoming.lse, incoming.products))
        for j, others in enumerate(keys.tiles):
            visible = seen(queries, i, keys, j, rule, key.device)
            if visible is False:
                continue
            scores = _scores(query, key[:, :, others], rule, visible)
            weights = (scores - lse).exp()
            value_grad[:, :, others] += (weights.to(grad.dtype).transpose(-1, -2) @ grad).to(wide)
            inner = weights.mul_((grad @ value[:, :, others].transpose(-1, -2)).to(wide) - products)
            if rule.softcap is not None:
                bent = scores.masked_fill(scores == -torch.inf, 0.0).div_(rule.softcap)
                inner *= 1 - bent.square_()
            inner = inner.mul_(rule.scale).to(query.dtype)
            add_rows(incoming.query_grad, tile, (inner @ key[:, :, others]).to(wide))
            key_grad[:, :, others] += (inner.transpose(-1, -2) @ query).to(wide)
    return key_grad, value_grad
