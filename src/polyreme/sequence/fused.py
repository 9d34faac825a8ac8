"""Attention of queries over keys by torch's fused kernels, which never hold a matrix of scores: on CPUs one
that takes masks, on CUDA devices flash attention, and memory-efficient attention where that takes no part.

The kernels give the log-sum-exp of each query's scores, and their backwards take that of all keys, so that
results over several blocks of keys can be merged (`block`). Shapes, dtypes and the device that computes alone
say which kernel is called, for tensors without numbers, too.

Communication: none."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyreme.layout.intervals import round_up
from polyreme.sequence.visible import Pairs, Rule

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
ON_CUDA = (*HALVES, torch.float32)
"""The dtypes that memory-efficient attention has."""
AMPERE = (8, 0)
"""The compute capability from which on CUDA devices have flash attention, and bfloat16."""


def computes_on(tensor: Tensor) -> str:
    """Return the type of the device that computes with a tensor."""
    return tensor.device.type


def takes(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> bool:
    """Return whether a kernel computes this attention."""
    on = computes_on(query)
    if rule.softcap is not None or any(each.stride(-1) != 1 for each in (query, key, value)):
        return False
    if on == "cuda":
        recent = not query.is_cuda or torch.cuda.get_device_capability(query.device) >= AMPERE
        eights = all(each.shape[-1] % 8 == 0 for each in (query, value))
        return query.dtype in ON_CUDA and eights and recent and torch.version.hip is None
    # an earlier kernel may read as many heads of keys as there are of queries
    grouped = query.shape[1] == key.shape[1] or torch.__version__ >= "2.13"
    return on == "cpu" and grouped and key.shape == value.shape


def kernel(query: Tensor, value: Tensor, pairs: Pairs) -> Literal["cpu", "flash", "efficient"]:
    """Return which kernel computes attention that one `takes`."""
    if computes_on(query) == "cpu":
        return "cpu"
    width = query.shape[-1]
    # its backward has no heads between 192 and 224 wide on some devices
    narrow = width == value.shape[-1] and (width <= 192 or 224 < width <= 256)
    plain = not isinstance(pairs.sees, Tensor)
    return "flash" if plain and narrow and query.dtype in HALVES else "efficient"


def attention(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each query's scores."""
    on = kernel(query, value, pairs)
    if on == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, pairs.causal, attn_mask=_added(pairs, query), scale=rule.scale
        )
    elif on == "flash":
        output, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, pairs.causal, scale=rule.scale
        )
    else:
        key, value = _of_each_head(query, key, value)
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(pairs, query), True, 0.0, pairs.causal, scale=rule.scale
        )
        lse = lse[:, :, : query.shape[2]]
    if isinstance(pairs.sees, Tensor):  # the kernels give another number for queries that see nothing
        lse = lse.masked_fill(~pairs.sees.any(-1)[:, None], -torch.inf)
    return output, lse


def gradients(
    given: tuple[Tensor, ...], key: Tensor, value: Tensor, pairs: Pairs, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. given: the queries, and of them the gradient of the
    output, the output and the log-sum-exps over all keys."""
    query, grad, output, lse = given
    on, causal, groups = kernel(query, value, pairs), pairs.causal, query.shape[1] // key.shape[1]
    found: tuple[Tensor, Tensor, Tensor]
    if on == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            query,
            key,
            value,
            output,
            lse,
            0.0,
            causal,
            attn_mask=_added(pairs, query),
            scale=rule.scale,
        )
        return found
    lengths, seed = (query.shape[2], key.shape[2]), query.new_empty(2, dtype=torch.uint64)  # of no dropout
    if on == "flash":
        found = aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, output, lse.contiguous(), None, None, *lengths),
            *(0.0, causal, seed, seed[0]),
            scale=rule.scale,
        )
        return found
    key, value = _of_each_head(query, key, value)
    # the kernel reads as many as its forward makes, of which those of no query give weights of 0
    lse = pad(lse, (0, -lengths[0] % 32), value=torch.inf).contiguous()
    of_query, *shared, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(grad, query, key, value, _bias(pairs, query), output, lse, seed, seed[0]),
        *(0.0, [True, True, True, False], causal),
        scale=rule.scale,
    )
    of_key, of_value = (each.unflatten(1, (-1, groups)).sum(2) if groups > 1 else each for each in shared)
    return of_query, of_key, of_value


def _of_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of as many heads as there are of queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _added(pairs: Pairs, query: Tensor, never: float = -torch.inf, multiple: int = 1) -> Tensor | None:
    """Return what is added to scores: `never` where a query does not see a key. multiple: of which the
    numbers from one query to the next in memory are one."""
    if not isinstance(pairs.sees, Tensor):
        return None
    *others, keys = pairs.sees.shape
    zeros = query.new_zeros((*others, round_up(keys, multiple)))[..., :keys]
    return zeros.masked_fill_(~pairs.sees, never)[:, None]


def _bias(pairs: Pairs, query: Tensor) -> Tensor | None:
    """Return the same for memory-efficient attention: finite, so that a query that sees nothing gets no NaN,
    and aligned."""
    added = _added(pairs, query, max(torch.finfo(query.dtype).min, -1e30), 16)
    return None if added is None else added.expand(-1, query.shape[1], -1, -1)
