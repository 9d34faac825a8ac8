"""Which torch optimizer updates which parameters, from the config or from what the caller passed.

Elementwise optimizers run on flat shards (boundary "element"); those that look at whole matrices get whole tensors ("tensor").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polyreme.config.keys import OptimizerSection
from polyreme.errors import ConfigError, Problem
from polyreme.layout import Boundary
from polyreme.model_map import matrices, no_decay

Make = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds a torch optimizer over parameter groups."""

WHOLE_TENSORS = {"Muon", "Adafactor"}
"""Optimizers of torch.optim whose update of a number depends on others of its tensor."""
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Optimizers of torch.optim with a fused kernel for CPU and CUDA."""


@dataclass(frozen=True)
class Group:
    """One optimizer group: which maker its parameters go to, with which options in place of the maker's own."""

    maker: int = 0
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Recipe:
    """How the parameters of a model are updated: makers, groups, the group of each parameter by name, and where shards may cut."""

    makers: tuple[Make, ...]
    groups: tuple[Group, ...]
    group_of: Mapping[str, int]
    boundary_of: tuple[Boundary, ...]  # by maker

    def boundary(self, group: int) -> Boundary:
        return self.boundary_of[self.groups[group].maker]


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of an interpolated momentum, with
    decoupled weight decay. One state of the parameter's size."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                direction = torch.lerp(parameter.grad, momentum, beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction.mul_(group["lr"]))
                momentum.lerp_(parameter.grad, 1 - beta2)
        return loss



def recipe(model: nn.Module, section: OptimizerSection, given: type[Optimizer] | Make | None = None) -> Recipe:
    """The recipe of the config section, or of `given`: a torch optimizer class (called with lr and options of the section) or a
    factory over parameter groups (which decides everything itself; weight-decay groups are the section's only).

    Raises ConfigError for an optimizer that cannot run on shards, or for options that it does not take.
    """
    names = [name for name, _ in model.named_parameters()]
    if given is not None:
        is_class = isinstance(given, type)
        make = _class_maker(given, section, {}) if is_class else given  # type: ignore[arg-type]
        kind = given.__name__ if is_class else type(_probe(make)).__name__  # type: ignore[union-attr]
        _refuse(kind)
        return Recipe((make,), (Group(),), dict.fromkeys(names, 0), ("tensor" if kind in WHOLE_TENSORS else "element",))
    spared = _spared(model, section)
    groups = [Group(0), Group(0, {"weight_decay": 0.0})]
    group_of = {name: int(name in spared) for name in names}
    adam = {"betas": section.betas, "eps": section.eps}
    if section.name == "muon":
        whole = matrices(model)
        groups.append(Group(1))
        group_of |= dict.fromkeys(whole, 2)
        rest = _class_maker(torch.optim.AdamW, section, adam, own_options=False)
        muon = _class_maker(torch.optim.Muon, section, {"lr": section.matrix_lr, "momentum": section.matrix_momentum})
        return Recipe((rest, muon), tuple(groups), group_of, ("element", "tensor"))
    known: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, adam),
        "adam": (torch.optim.Adam, adam),
        "sgd": (torch.optim.SGD, {"momentum": section.momentum, "nesterov": section.nesterov}),
        "adagrad": (torch.optim.Adagrad, {"eps": section.eps}),
        "lion": (Lion, {"betas": section.betas}),
    }
    cls, arguments = known.get(section.name) or (getattr(torch.optim, section.name), {})
    _refuse(cls.__name__)
    boundary: Boundary = "tensor" if cls.__name__ in WHOLE_TENSORS else "element"
    return Recipe((_class_maker(cls, section, arguments),), tuple(groups), group_of, (boundary,))


def _class_maker(cls: type[Optimizer], section: OptimizerSection, arguments: Mapping[str, Any], own_options: bool = True) -> Make:
    taken = inspect.signature(cls).parameters
    options = {"lr": section.lr, "weight_decay": section.weight_decay, **arguments}
    if cls.__name__ in FUSED:
        options["fused"] = True
    options = {key: value for key, value in options.items() if key in taken}
    if own_options:
        unknown = sorted(set(section.options) - set(taken))
        if unknown:
            raise ConfigError([Problem(f"optimizer.options.{key}", section.options[key], f"{cls.__name__} does not take it",
                                       f"one of {', '.join(k for k in taken if k != 'params')}") for key in unknown])  # fmt: skip
        options |= section.options
        if options.get("foreach") or options.get("differentiable"):
            options.pop("fused", None)
    make = lambda groups: cls(groups, **options)  # noqa: E731
    try:
        _probe(make)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError([Problem("optimizer", options, f"{cls.__name__} refuses it: {error}", "change the options")]) from error
    return make


def _probe(make: Make) -> Optimizer:
    """An optimizer over one small matrix: to see what a factory makes, and that it makes it."""
    made = make([{"params": [torch.zeros(2, 2)]}])
    if not isinstance(made, Optimizer):
        raise ConfigError([Problem("optimizer", made, "the factory did not return a torch optimizer",
                                   "pass a torch.optim class, or a function of parameter groups that returns an optimizer")])  # fmt: skip
    return made


def _refuse(kind: str) -> None:
    reasons = {"LBFGS": "needs the whole model's gradient and several evaluations a step", "SparseAdam": "takes sparse gradients only"}
    if kind in reasons:
        raise ConfigError([Problem("optimizer.name", kind, reasons[kind], 'use an elementwise optimizer such as "adamw"')])


def _spared(model: nn.Module, section: OptimizerSection) -> set[str]:
    """Names of the parameters without weight decay."""
    if section.no_decay == "none":
        return set()
    if section.no_decay == "vectors":
        return no_decay(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in section.no_decay)}
