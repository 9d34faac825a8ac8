"""Which parameters are experts': none, unless a script marks them so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from polyreme.compat.deepspeed.moe.layer import MoE
from polyreme.compat.deepspeed.refusal import refused

T = TypeVar("T", bound=Tensor)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and how many experts; no model has."""
    return any(isinstance(module, MoE) for module in m.modules()), 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is marked as an expert's."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer is marked as experts'."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[T]) -> tuple[list[T], list[T]]:
    """Those that are not marked as experts', and those that are."""
    every = list(params)
    return [p for p in every if not is_moe_param(p)], [p for p in every if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Their gradients, where they have some."""
    shared, experts = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return (
        [p.grad.to(p.dtype) for p in shared if p.grad is not None],
        [p.grad.to(p.dtype) for p in experts if p.grad is not None],
    )


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """An optimizer's groups, as they are. Raises UnsupportedError if one has a parameter of an expert."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(each) for group in groups for each in group["params"]):
        raise refused(
            "a parameter group of experts", "Polyreme divides no experts yet", "take them as others"
        )
    return groups
