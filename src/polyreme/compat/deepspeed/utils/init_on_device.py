"""A context that builds modules on another device and in another dtype than torch's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class _Constructors(TorchFunctionMode):
    """A mode in which torch's constructors make their tensors on `device`, and floating-point ones in
    `dtype`."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.dtype, self.device, self.made = dtype, device, _device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in self.made:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = self.device
        tensor = func(*args, **kwargs)
        return tensor.to(self.dtype) if torch.is_floating_point(tensor) else tensor


def _of_sizes(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Make `torch.Tensor(2, 3)` by a function that a mode sees, which its own constructor is not."""
    if cls is torch.Tensor and not kwargs and all(isinstance(each, int) for each in args):
        return torch.empty(args)
    return torch._C.TensorBase.__new__(cls, *args, **kwargs)


class OnDevice:
    """A context in which tensors are made on `device` (by default "meta", without memory), and floating-point
    ones in `dtype`. It does nothing unless `enabled`."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._mode = _Constructors(dtype, device)

    def __enter__(self) -> None:
        if self.enabled:
            self._mode.__enter__()
            torch.Tensor.__new__ = _of_sizes  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            torch.Tensor.__new__ = torch._C.TensorBase.__new__  # type: ignore[method-assign]
            self._mode.__exit__(*error)
