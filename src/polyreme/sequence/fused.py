"""Attention of queries over keys by torch's fused kernel for CPUs, which never holds a matrix of scores.

The kernel gives the log-sum-exp of each query's scores, and its backward takes that of all keys, so that
results over several blocks of keys can be merged (`block`).

Communication: none."""

from __future__ import annotations

import torch
from torch import Tensor

from polyreme.sequence.visible import Pairs, Rule

aten = torch.ops.aten


def computes_on(tensor: Tensor) -> str:
    """Return the type of the device that computes with a tensor."""
    return tensor.device.type


def takes(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> bool:
    """Return whether the kernel computes this attention."""
    plain = computes_on(query) == "cpu" and rule.softcap is None and key.shape == value.shape
    dense = all(each.stride(-1) == 1 for each in (query, key, value))
    # an earlier kernel may read as many heads of keys as there are of queries
    grouped = query.shape[1] == key.shape[1] or torch.__version__ >= "2.13"
    return plain and dense and grouped


def attention(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each query's scores."""
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, pairs.causal, attn_mask=_added(pairs, query.dtype), scale=rule.scale
    )
    if isinstance(pairs.sees, Tensor):  # the kernel gives 0 for queries that see nothing
        lse = lse.masked_fill(~pairs.sees.any(-1)[:, None], -torch.inf)
    return output, lse


def gradients(
    given: tuple[Tensor, ...], key: Tensor, value: Tensor, pairs: Pairs, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. given: the queries, and of them the gradient of the
    output, the output and the log-sum-exps over all keys."""
    query, grad, output, lse = given
    mask = _added(pairs, query.dtype)
    found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, pairs.causal, attn_mask=mask, scale=rule.scale
    )
    return found


def _added(pairs: Pairs, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to scores: -inf where a query does not see a key."""
    if not isinstance(pairs.sees, Tensor):
        return None
    zeros = torch.zeros(pairs.sees.shape, dtype=dtype, device=pairs.sees.device)
    return zeros.masked_fill_(~pairs.sees, -torch.inf)[:, None]
