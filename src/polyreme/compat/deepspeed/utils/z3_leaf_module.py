"""Modules that ZeRO 3 is to gather whole, with all below them ("leaves"): marks that an engine reads.

Invariant: a mark is the attribute `_z3_leaf` of the module, as DeepSpeed writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from polyreme.compat.deepspeed.refusal import ArgumentError

Classes = Sequence[type[nn.Module] | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether an engine found this parameter below a marked module."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or take its mark off."""
    model._z3_leaf = flag  # type: ignore[assignment]


def _is(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    """Whether the module is of this class, or its class has this name, with or without its package."""
    if isinstance(kind, type):
        return isinstance(module, kind)
    return kind in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")


def _mark_classes(model: nn.Module, classes: Classes, flag: bool, required: bool) -> list[nn.Module]:
    if not all(isinstance(kind, type | str) for kind in classes):
        raise ArgumentError(f"leaf_module_classes must be a list of types or names, got {classes}")
    found = [module for module in model.modules() if any(_is(module, kind) for kind in classes)]
    if not found and required:
        raise ArgumentError(
            f"No modules of type {classes} found in model {type(model).__name__}: name classes that it has, "
            "or pass raise_if_not_found=False"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or class names, and return them. Raises ArgumentError where there
    are none."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of these classes off, and return the modules."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def _mark_names(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool, required: bool
) -> tuple[list[nn.Module], list[str]]:
    found, missing, modules = dict[int, nn.Module](), list[str](), dict(model.named_modules())
    for want in wanted:
        fitting = [module for name, module in modules.items() if fits(name, want)]
        found |= {id(module): module for module in fitting}
        missing += [] if fitting else [want]
    for module in found.values():
        set_z3_leaf_module(module, flag)
    if missing and required:
        raise ArgumentError(
            f"No modules named {missing} found in model {type(model).__name__}: take names of its "
            "named_modules(), or pass raise_if_not_found=False"
        )
    return list(found.values()), missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; return them and the names without any."""
    return _mark_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; return them and the endings without any."""
    return _mark_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Mark what a config's `leaf_module` section names (`classes`, `names`, `name_suffixes`)."""
    if leaf_cfg is None:
        return []
    found = [
        *_mark_classes(model, leaf_cfg.classes or (), True, False),
        *set_z3_leaf_modules_by_name(model, leaf_cfg.names or (), raise_if_not_found=False)[0],
        *set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes or (), raise_if_not_found=False)[0],
    ]
    return list({id(module): module for module in found}.values())
