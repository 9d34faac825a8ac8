"""Takes apart the activations that one stage sends to the next: a value into its form and its tensors.

Invariant: form and tensors together are the value. The form has all but the numbers: the structure, and each
tensor's dtype, shape and whether it requires grad.

Communication (by `pipeline.executor`): the form once for each shape of batch; the tensors for each
micro-batch, and their gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import ModelError


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """Take a value apart. Returns its form, which JSON can hold, and its tensors.

    The value may have tensors and constants in tuples, lists and dictionaries; raises ModelError for anything
    else."""
    tensors: list[Tensor] = []
    return _form_of(value, tensors), tensors


# these two are no functions within the others, which would be in a circle with what they hold: Python frees
# that late, and with it the tensors


def _form_of(inner: Any, tensors: list[Tensor]) -> Any:
    if isinstance(inner, Tensor):
        tensors.append(inner)
        return {
            "dtype": str(inner.dtype).removeprefix("torch."),
            "shape": list(inner.shape),
            "grad": inner.requires_grad,
        }
    if isinstance(inner, dict):
        return {"dict": {key: _form_of(each, tensors) for key, each in inner.items()}}
    if type(inner) in (tuple, list):
        return {type(inner).__name__: [_form_of(each, tensors) for each in inner]}
    if inner is None or isinstance(inner, bool | int | float | str):
        return inner
    raise ModelError(
        f"the model hands a {type(inner).__name__} from block to block, "
        "which cannot be sent to another stage: use tensors, alone or in "
        "tuples, lists and dictionaries"
    )


def _value_of(inner: Any, todo: Iterator[Tensor]) -> Any:
    if not isinstance(inner, dict):
        return inner
    if "shape" in inner:
        return next(todo).detach().requires_grad_(inner["grad"])
    if "dict" in inner:
        return {key: _value_of(each, todo) for key, each in inner["dict"].items()}
    values = [_value_of(each, todo) for each in inner["tuple" if "tuple" in inner else "list"]]
    return tuple(values) if "tuple" in inner else values


def unflatten(form: Any, tensors: Iterable[Tensor]) -> Any:
    """Put a value together again from its form and received tensors. Those that the backward goes through
    require grad, and their `.grad` is to be sent back; the model may write to all of them."""
    return _value_of(form, iter(tensors))


def buffers(form: Any, device: torch.device) -> list[Tensor]:
    """Return empty tensors of this form, to receive into."""
    if not isinstance(form, dict):
        return []
    if "shape" in form:
        return [torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=device)]
    (inner,) = form.values()
    return [
        tensor
        for each in (inner.values() if isinstance(inner, dict) else inner)
        for tensor in buffers(each, device)
    ]
