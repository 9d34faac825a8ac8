"""Embeddings whose gradient is the rows that were looked up, not a table of zeros with these rows in it.

Invariant: a gradient by rows goes nowhere but to `zero.bucket`, which adds the rows to the flat buffer:
whoever looks at a table's gradient in a backward (a hook of its own, `torch.autograd.grad`, a second
derivative) gets it whole. Both add the same rows in the same order. Tables in half precision are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from polyreme.models.patches import Patches

_wanted = False  # shared by all threads: autograd may run nodes in one of its own


@contextmanager
def gradients_by_rows() -> Iterator[None]:
    """A backward that runs inside gives tables their gradients by rows."""
    global _wanted
    _wanted = True
    try:
        yield
    finally:
        _wanted = False


def look_up_by_rows(model: nn.Module, patches: Patches) -> None:
    """Let the embeddings of `model` give their gradients by rows, where `gradients_by_rows` asks for it.
    Classes with a forward of their own are left alone."""
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding)
            and type(module).forward is nn.Embedding.forward
            and "forward" not in vars(module)
        ):
            patches.forward(module, functools.partial(_forward, module))


def _forward(module: nn.Embedding, input: Tensor) -> Tensor:
    special = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    # adding row by row to a long sum would lose digits there
    special = special or module.weight.dtype.itemsize < 4
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if special or not module.weight.is_leaf or transformed:
        return nn.Embedding.forward(module, input)
    found: Tensor = _LookUp.apply(
        input, module.weight, -1 if module.padding_idx is None else module.padding_idx
    )
    return found


class _LookUp(Function):
    """ids: any shape; table: (rows, width), a leaf; the gradient of row `padding` is zero."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.padding = table, padding
        return torch.embedding(table, ids, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        if not _wanted or torch.is_grad_enabled() or ctx.table._backward_hooks:
            return (
                None,
                torch.ops.aten.embedding_dense_backward(grad, ids, ctx.table.shape[0], ctx.padding, False),
                None,
            )
        which, rows = ids.reshape(-1).long(), grad.reshape(-1, grad.shape[-1])
        if ctx.padding >= 0:
            counted = which != ctx.padding
            which, rows = which[counted], rows[counted]
        return None, torch.sparse_coo_tensor(which[None], rows, ctx.table.shape, check_invariants=False), None
