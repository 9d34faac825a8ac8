"""Attention of models without numbers, by the operator that the device of the run would choose, so that
autograd keeps what it keeps there: on the meta device torch itself falls back to products of whole matrices
of scores.

Invariant: shapes, dtypes and strides alone decide, by the rules of torch's kernels. No communication."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme.sequence import fused

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256
"""The widest head that flash attention takes on a GPU."""
Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None, bool]
"""Those of `torch.nn.functional.scaled_dot_product_attention`, in its order."""


@contextmanager
def attention_of(computes_on: str) -> Iterator[None]:
    """Context in which attention on meta tensors is that of a device of type `computes_on`."""
    own, attend = F.scaled_dot_product_attention, _on_cpu if computes_on == "cpu" else _on_gpu

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        plain = (query, key, value, attn_mask, dropout_p, is_causal)
        found = attend((*plain, scale, enable_gqa)) if query.is_meta else None
        return own(*plain, scale=scale, enable_gqa=enable_gqa) if found is None else found

    # not a mode for torch's functions, which has no part in a recomputation
    with (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(fused, "computes_on", lambda _: computes_on),
    ):
        yield


def _on_cpu(given: Arguments) -> Tensor | None:
    """Return the result of flash attention; None where the CPU multiplies whole matrices."""
    query, key, value, mask, dropout, is_causal, scale, grouped = given
    if (
        dropout > 0
        or (mask is not None and mask.requires_grad)
        or not _fits(query, key, value)
        or (not grouped and query.shape[1] != key.shape[1])
    ):
        return None
    mask = None if mask is None else _added(mask, query.dtype)
    return cast(Tensor, aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, attn_mask=mask, scale=scale
    )[0])  # fmt: skip


def _on_gpu(given: Arguments) -> Tensor | None:
    """Return the result of flash attention, in half precision without a mask, or of memory-efficient
    attention; None where a GPU multiplies whole matrices."""
    query, key, value, mask, dropout, is_causal, scale, grouped = given
    if not _fits(query, key, value):
        return None
    width = query.shape[-1]
    if mask is None and query.dtype in HALVES and width <= FLASH_WIDTH:
        if width % 8:  # torch pads heads, and cuts what it added off again
            query, key, value = (F.pad(each, [0, 8 - width % 8]) for each in (query, key, value))
            scale = 1 / math.sqrt(width) if scale is None else scale
        found: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal, False, scale=scale
        )[0]
        return found[..., :width] if width % 8 else found
    if grouped and query.shape[1] != key.shape[1]:
        return None
    if mask is not None:
        mask = _added(mask, query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    attend = aten._scaled_dot_product_efficient_attention
    return cast(Tensor, attend(query, key, value, mask, keeps, dropout, is_causal, scale=scale)[0])


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a fused kernel takes tensors of these shapes, dtypes and strides."""
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    there = all(each.dim() == 4 and each.stride(-1) == 1 and each.numel() > 0 for each in (query, key, value))
    return alike and there and query.shape[0] == key.shape[0]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(each, dtype=dtype, device=mask.device) for each in (0.0, -math.inf))
    return torch.where(mask, zero, never)
