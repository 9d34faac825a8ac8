"""DeepSpeed's functions that tell the parameters of experts from others. A parameter is an expert's only if a
script marks it as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from polyreme.compat.deepspeed.refusal import refused

T = TypeVar("T", bound=Tensor)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): no model has layers of DeepSpeed's experts here."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter is marked as an expert's."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether a group of an optimizer is marked as one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[T]) -> tuple[list[T], list[T]]:
    """Return the parameters that are not marked as experts', and those that are."""
    every = list(params)
    return [p for p in every if not is_moe_param(p)], [p for p in every if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the parameters that are not marked as experts', and of those that are, in the
    parameters' dtypes. Parameters without a gradient are left out."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for param in group:
        if param.grad is not None:
            parts[is_moe_param(param)].append(param.grad.to(param.dtype))
    return parts


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Return an optimizer's groups as they are. Raises UnsupportedError if one has a parameter of an
    expert."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(each) for group in groups for each in group["params"]):
        raise refused(
            "a parameter group of experts", "Polyreme divides no experts yet", "take them as others"
        )
    return groups
