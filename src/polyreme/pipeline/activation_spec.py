"""Activations that one stage sends to the next: a value, its form and its tensors.

Invariant: form and tensors together are the value. The form has all but the numbers: the structure, and each
tensor's dtype, shape and whether it requires grad.

Communication (by `pipeline.run`): the form once for each shape of batch; the tensors for each micro-batch,
and their gradients back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyreme.errors import ModelError


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """What a stage sends: its form, which JSON can hold, and its tensors.

    The form is of use to agree on once: it has the structure (tensors and constants in tuples, lists and
    dictionaries), and each tensor's dtype, shape and whether it requires grad. Raises ModelError for anything
    else."""
    tensors: list[Tensor] = []

    def form_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return {
                "dtype": str(part.dtype).removeprefix("torch."),
                "shape": list(part.shape),
                "grad": part.requires_grad,
            }
        if isinstance(part, dict):
            return {"dict": {key: form_of(each) for key, each in part.items()}}
        if type(part) in (tuple, list):
            return {type(part).__name__: [form_of(each) for each in part]}
        if part is None or isinstance(part, bool | int | float | str):
            return part
        raise ModelError(
            f"the model hands a {type(part).__name__} from block to block, "
            "which cannot be sent to another stage: use tensors, alone or in "
            "tuples, lists and dictionaries"
        )

    return form_of(value), tensors


def unflatten(form: Any, tensors: Iterable[Tensor]) -> Any:
    """The value that was taken apart, of tensors as they were received. Those that the backward goes through
    require grad, and their `.grad` is what to send back; the model may write to them all."""
    todo = iter(tensors)

    def value_of(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "shape" in part:
            return next(todo).detach().requires_grad_(part["grad"])
        if "dict" in part:
            return {key: value_of(each) for key, each in part["dict"].items()}
        return (
            tuple(map(value_of, part["tuple"]))
            if "tuple" in part
            else [value_of(each) for each in part["list"]]
        )

    return value_of(form)


def buffers(form: Any, device: torch.device) -> list[Tensor]:
    """Empty tensors to receive what was taken apart into."""
    if not isinstance(form, dict):
        return []
    if "shape" in form:
        return [torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=device)]
    (parts,) = form.values()
    return [
        tensor
        for part in (parts.values() if isinstance(parts, dict) else parts)
        for tensor in buffers(part, device)
    ]
