"""Attention of queries over blocks of keys, one after the other, and its gradients.

The output over several blocks is merged by their log-sum-exps (Dao et al. 2022, "FlashAttention"; Liu et al.
2023, "Ring Attention"). Fused kernels compute it (`fused`). What they do not take is computed a tile of
scores at a time, in float32, or in float64 where numbers are. Grouped heads are not repeated: the queries of
a group are rows of one product.

Communication: none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme.sequence import fused
from polyreme.sequence.visible import Pairs, Rule, Tokens, pairs


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

    def add(self, tile: slice, output: Tensor, lse: Tensor) -> None:
        """Merge the output of a tile of queries over more keys."""
        before, here = self.lse[:, :, tile], self.output[:, :, tile]
        total = torch.logaddexp(before, lse)
        here.lerp_(output.to(here.dtype), (lse - _finite(total)).exp().unsqueeze(-1))
        before.copy_(total)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add a score for each head to every query's, of a value that is zero."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.output.mul_((self.lse - total).exp().unsqueeze(-1))
        self.lse.copy_(total)


def _rows(tensor: Tensor, groups: int) -> Tensor:
    """Return (samples, heads, tokens, width) as (samples, key heads, tokens of all the queries' heads that
    share one, width)."""
    return tensor.unflatten(1, (groups, -1)).flatten(2, 3)


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
    joined = fused.takes(query, key, value, rule)
    attention = fused.attention if joined else _attention
    for part in pairs(queries, keys, rule, query.device, joined):
        mine, others = query[:, :, part.queries], (key[:, :, part.keys], value[:, :, part.keys])
        merged.add(part.queries, *attention(mine, *others, part, rule))


def _attention(query: Tensor, key: Tensor, value: Tensor, part: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return what `fused.attention` does, from scores."""
    scores = _scores(_rows(query, key.shape[1]), key, rule, part.sees)
    lse = scores.logsumexp(-1, keepdim=True)
    output = scores.sub_(_finite(lse)).exp_().to(value.dtype) @ value
    return output.view(*query.shape[:3], -1), lse.view(query.shape[:3])


@dataclass(frozen=True)
class Incoming:
    """What the gradients of queries, keys and values need: the queries, the gradient of the output, and the
    output and log-sum-exps of all keys. query_grad: the sum of gradients so far."""

    query: Tensor
    grad: Tensor
    output: Tensor
    lse: Tensor
    query_grad: Tensor

    @classmethod
    def of(cls, query: Tensor, grad: Tensor, output: Tensor, lse: Tensor) -> Incoming:
        """Return it for a gradient of the merged output, of all blocks."""
        query_grad = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        return cls(query, grad.contiguous(), output, _finite(lse), query_grad)

    def of_queries(self, tile: slice) -> tuple[Tensor, ...]:
        """Return the queries, gradient, output and log-sum-exps of a tile."""
        return tuple(each[:, :, tile] for each in (self.query, self.grad, self.output, self.lse))

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of the sinks."""
        share = (sinks.to(self.lse.dtype)[:, None] - self.lse).exp()
        products = (self.grad.to(share.dtype) * self.output.to(share.dtype)).sum(-1)
        return -(share * products).sum((0, 2)).to(sinks.dtype)


def differentiate(
    incoming: Incoming, key: Tensor, value: Tensor, queries: Tokens, keys: Tokens, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Add the queries' gradient of a block of keys and values to `incoming`, and return the block's own."""
    wide, joined = incoming.lse.dtype, fused.takes(incoming.query, key, value, rule)
    gradients = fused.gradients if joined else _gradients
    key_grad, value_grad = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
    for part in pairs(queries, keys, rule, key.device, joined):
        mine, others = incoming.of_queries(part.queries), (key[:, :, part.keys], value[:, :, part.keys])
        found = gradients(mine, *others, part, rule)
        incoming.query_grad[:, :, part.queries] += found[0]
        key_grad[:, :, part.keys] += found[1]
        value_grad[:, :, part.keys] += found[2]
    return key_grad, value_grad


def _gradients(
    given: tuple[Tensor, ...], key: Tensor, value: Tensor, part: Pairs, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `fused.gradients` does, from scores."""
    shape, groups = given[0].shape, key.shape[1]
    query, grad, output = (_rows(each, groups) for each in given[:3])
    lse = _rows(given[3].unsqueeze(-1), groups)
    wide = lse.dtype
    products = (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    scores = _scores(query, key, rule, part.sees)
    weights = (scores - lse).exp()
    of_value = weights.to(grad.dtype).transpose(-1, -2) @ grad
    inner = weights.mul_((grad @ value.transpose(-1, -2)).to(wide) - products)
    if rule.softcap is not None:
        bent = scores.masked_fill(scores == -torch.inf, 0.0).div_(rule.softcap)
        inner *= 1 - bent.square_()
    inner = inner.mul_(rule.scale).to(query.dtype)
    return (inner @ key).view(shape), inner.transpose(-1, -2) @ query, of_value
