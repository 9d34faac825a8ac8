"""Tensors without numbers, on which a rank of a run that does not exist computes where only shapes, bytes and
calls are asked for.

Invariant: reading a meta tensor gives zero, in whichever way, so that code which looks at a norm, a flag or a
mask goes on; asking whether all of its numbers are true gives True, so that models which look whether a mask
hides anything find that it does not. No communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class WithoutNumbers(TorchDispatchMode):
    """Makes reads of meta tensors succeed, for which torch raises: an item is 0, a copy on another device is
    zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[func is aten.copy_.default] if args else None
        if isinstance(source, Tensor) and source.is_meta:
            device = kwargs.get("device")
            if func is aten._local_scalar_dense.default:
                if getattr(source, "_of_all", False):
                    return True
                return torch.zeros((), dtype=source.dtype).item()
            if func is aten._to_copy.default and device is not None and device.type != "meta":
                return func(torch.zeros_like(source, device=device), **kwargs)
            if func is aten.copy_.default and not args[0].is_meta:
                return args[0].zero_()
            if func is aten.index.Tensor and [each.dtype for each in args[1] if each is not None] == [
                torch.bool
            ]:
                (mask,) = args[1]  # taken to be true everywhere
                return source.new_empty(mask.numel(), *source.shape[mask.dim() :])
        if func in _SUMS and isinstance(args[1], Tensor) and args[1].is_meta:
            by_rows = [each.layout == torch.sparse_coo for each in args[:2]]
            if by_rows[1]:
                return _sum(*args) if by_rows[0] else args[0]
        return note_all(func, func(*args, **kwargs))


_SUMS = (aten.add.Tensor, aten.add_.Tensor)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two tensors by rows, which torch does not compute on the meta device."""
    indices, values = (
        torch.cat(each, dim)
        for each, dim in (([a._indices(), b._indices()], 1), ([a._values(), b._values()], 0))
    )
    return torch.sparse_coo_tensor(indices, values, a.shape, check_invariants=False)


def note_all(func: Any, result: Any) -> Any:
    """Mark the result of asking whether all numbers are true. Returns it."""
    if func is aten.all.default:
        result._of_all = True
    return result
