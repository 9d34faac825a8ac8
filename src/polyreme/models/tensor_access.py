"""Tells which functions of torch read or write a tensor's numbers, and which only its shape, device or hooks;
which modules have hooks that see gradients; and lists parameters by name where reading their numbers is
refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_HARMLESS = {
    "shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "numel", "nelement",
    "size", "dim", "ndimension", "stride", "storage_offset", "element_size", "get_device", "result_type",
    "untyped_storage", "_base", "_version", "output_nr", "requires_grad", "requires_grad_", "grad",
    "_grad", "grad_fn", "retain_grad", "retains_grad", "register_hook",
    "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks", "_is_view",
    "_is_zerotensor", "has_names", "_has_compatible_shallow_copy_type", "empty_like", "zeros_like",
    "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones", "new_full",
    "__len__", "__hash__", "__dlpack_device__",
}  # fmt: skip
"""Names of functions and attributes that do not touch a tensor's numbers, beside those that begin with
`is_`."""


def touching(func: Callable[..., Any]) -> str | None:
    """Return the name of the function or attribute that `__torch_function__` got as `func`, if it reads or
    writes numbers; else None."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return None if name in _HARMLESS or (name.startswith("is_") and name != "is_nonzero") else name


_FORMS = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""Functions that use only the shape, dtype or device of their other arguments."""


def read(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> tuple[str | None, list[Any]]:
    """Return the result of `touching`, and the arguments whose numbers the function needs."""
    name = touching(func)
    asked = (args[:1] if name in _FORMS else args, kwargs)
    return name, [] if name is None else pytree.tree_leaves(asked)


_IN_PLACE = re.compile("__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__")


def writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[Tensor]) -> bool:
    """Whether a function `name` with these arguments writes to a tensor of the class `kind`."""
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or _IN_PLACE.fullmatch(name):
        return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(args[:1]))
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(kwargs.get("out")))


def entries(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers themselves, by each of their names; also for a module
    whose `state_dict()` is refused."""
    with torch._C.DisableTorchFunctionSubclass():
        found: dict[str, Tensor] = module.state_dict(keep_vars=True)
        return found


def sees_gradients(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules has a backward hook, or there is a global one."""
    of_all = torch.nn.modules.module
    return bool(of_all._global_backward_hooks or of_all._global_backward_pre_hooks) or any(
        module._backward_hooks or module._backward_pre_hooks for module in modules
    )
