"""Tensors without numbers: what a rank of a run that does not exist computes with where only shapes, bytes
and calls are asked for.

Invariant: what is read of a meta tensor is zero, in whichever way, so that code which looks at a norm, at a
flag or at a mask goes on. No communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class WithoutNumbers(TorchDispatchMode):
    """Answers what is read of meta tensors, for which torch has an error: a number of one with 0, a copy on
    another device with zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[func is aten.copy_.default] if args else None
        if isinstance(source, Tensor) and source.is_meta:
            device = kwargs.get("device")
            if func is aten._local_scalar_dense.default:
                return torch.zeros((), dtype=source.dtype).item()
            if func is aten._to_copy.default and device is not None and device.type != "meta":
                return func(torch.zeros_like(source, device=device), **kwargs)
            if func is aten.copy_.default and not args[0].is_meta:
                return args[0].zero_()
        return func(*args, **kwargs)
