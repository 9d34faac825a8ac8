"""Embeddings whose gradient is only the rows that were looked up, not a whole table of mostly zeros.

Invariant: only `zero.bucket` gets a gradient by rows, and adds the rows to its flat buffer: a user's hook on
the table, `torch.autograd.grad` or a second derivative gets the whole gradient. Both add the same rows in the
same order. Tables in half precision always have whole gradients.
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
    """Make backwards inside of the context give tables their gradients by rows."""
    global _wanted
    _wanted = True
    try:
        yield
    finally:
        _wanted = False


def look_up_by_rows(model: nn.Module, patches: Patches) -> None:
    """Replace the forward of the embeddings of `model`, so that `gradients_by_rows` applies to them. Classes
    with a forward of their own are left as they are."""
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
    """Looks up the rows `ids` (any shape) of `table` (rows, width), a leaf. The gradient of row `padding` is
    zero."""

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
            if which.is_meta:  # without numbers no row is taken to be one of padding
                which, rows = which.clone(), rows.clone()
            else:
                which, rows = which[counted], rows[counted]
        return None, torch.sparse_coo_tensor(which[None], rows, ctx.table.shape, check_invariants=False), None
