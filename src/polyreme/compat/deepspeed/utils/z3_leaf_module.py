"""Marks on modules that ZeRO stage 3 is to gather as a whole, with all modules inside them ("leaf modules").

Invariant: a mark is the attribute `_z3_leaf` of the module, as DeepSpeed writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from polyreme.compat.deepspeed.refusal import ArgumentError

Classes = Sequence[type[nn.Module] | str]
Found = tuple[list[nn.Module], list[Any]]
Fits = Callable[[str, nn.Module, Any], bool]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether an engine found this parameter below a marked module."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of `model`."""
    return [*filter(z3_leaf_module, model.modules())]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module as a leaf, or remove the mark if `flag` is false."""
    model._z3_leaf = flag  # type: ignore[assignment]


def _mark(model: nn.Module, wanted: Sequence[Any], fits: Fits, flag: bool, required: bool) -> Found:
    """Mark the modules that fit one of `wanted`, or remove their marks if `flag` is false. Returns them, and
    those of `wanted` that no module fits: for these it raises ArgumentError if all are `required`."""
    found, missing = dict[int, nn.Module](), []
    for want in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, module, want)]
        found |= {id(module): module for module in fitting}
        missing += [] if fitting else [want]
    if missing and required:
        raise ArgumentError(
            f"leaf modules {missing}: a {type(model).__name__} has none such; take classes or names of its "
            "named_modules(), or pass raise_if_not_found=False"
        )
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _is_of(name: str, module: nn.Module, kind: type[nn.Module] | str) -> bool:
    """Return whether the module is of this class, or its class has this name, with or without its package."""
    if isinstance(kind, type):
        return isinstance(module, kind)
    return kind in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")


def _mark_classes(model: nn.Module, classes: Classes, flag: bool, required: bool) -> list[nn.Module]:
    if not all(isinstance(kind, type | str) for kind in classes):
        raise ArgumentError(f"leaf_module_classes={classes}: give classes of modules, or their names")
    found, missing = _mark(model, classes, _is_of, flag, False)
    if required and not found:
        _mark(model, missing, _is_of, flag, True)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes with these names, as leaves. Returns them. Raises
    ArgumentError if the model has none."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of these classes. Returns the modules. Raises ArgumentError if the
    model has none."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> Found:
    """Mark the modules of these names, as `named_modules()` has them. Returns them, and the names that no
    module has. Raises ArgumentError for such names unless `raise_if_not_found` is false."""
    return _mark(model, module_names, lambda name, _, want: name == want, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> Found:
    """Mark the modules whose names end in one of these. Returns them, and the endings that no name has.
    Raises ArgumentError for such endings unless `raise_if_not_found` is false."""
    return _mark(model, module_name_suffixes, lambda n, _, want: n.endswith(want), flag, raise_if_not_found)


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Mark the modules that the config section `leaf_module` lists by `classes`, `names` and `name_suffixes`.
    Returns them."""
    if leaf_cfg is None:
        return []
    found = [
        *_mark_classes(model, leaf_cfg.classes or (), True, False),
        *set_z3_leaf_modules_by_name(model, leaf_cfg.names or (), raise_if_not_found=False)[0],
        *set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes or (), raise_if_not_found=False)[0],
    ]
    return list({id(module): module for module in found}.values())
