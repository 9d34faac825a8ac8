"""Chooses the torch optimizer and options of each parameter, from the config or from the caller's optimizer.

Invariant: an optimizer runs on flat shards (boundary "element") only if cutting a tensor does not change its
update, which is tried out on small tensors; one that needs whole tensors gets them whole ("tensor"), and one
whose update of a tensor depends on the others is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from torch.optim import Optimizer

from polyreme.config.schema import OptimizerSection
from polyreme.errors import ConfigError, ModelError, Problem, warn
from polyreme.layout.bucket_layout import ALIGN, Boundary
from polyreme.models.huggingface import matrices, no_decay
from polyreme.optim.lamb import Lamb

Make = Callable[[Any], Optimizer]
"""Builds a torch optimizer over parameters or parameter groups."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch.optim with a fused kernel."""
FUSES = "fuses"
"""The key of a group whose tensors no fused kernel takes: what `fused` is where one does."""


@dataclass(frozen=True)
class Group:
    """One optimizer group. make: builds its optimizer. boundary: where shards may cut tensors. options:
    override those of `make`."""

    make: Make
    boundary: Boundary
    options: Mapping[str, Any] = field(default_factory=dict)

    def optimizer(self, tensors: Sequence[Tensor]) -> Optimizer:
        """Build the torch optimizer of this one group."""
        made = self.make([{**self.options, "params": list(tensors)}])
        # Adagrad's fused kernel is for CPUs alone, and none is for the meta device
        without = {"meta", "cuda"} if isinstance(made, torch.optim.Adagrad) else {"meta"}
        if any(t.device.type in without for t in tensors):
            for group in made.param_groups:
                group[FUSES], group["fused"] = group.get("fused"), False
        return made


def trial_state(
    group: Group, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, Any]:
    """Return the state that the group's optimizer keeps of a parameter of this shape, after a step on zeros.
    The trial is on real tensors if shape is None (ALIGN elements are tried then), or the optimizer reads
    values of fake ones."""
    if shape is not None:
        with suppress(DataDependentOutputException):  # raised by fake tensors
            return _trial_state(group, shape, dtype, device)
    with unset_fake_temporarily():
        return _trial_state(group, shape or (ALIGN,), dtype, device)


def _trial_state(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
) -> dict[str, Any]:
    trial = torch.zeros(shape, dtype=dtype, device=device)
    trial.grad = torch.zeros_like(trial)
    optimizer = group.optimizer([trial])
    optimizer.step()
    return optimizer.state[trial]


@dataclass(frozen=True)
class Recipe:
    """The optimizer groups of a model, and the group of each parameter by name. own_dtypes: dtypes of frozen
    parameters with a dtype that no trained one has, such as the bf16 base of fp32 adapters; they keep it.
    left_out: names of the parameters in no group of the caller's optimizer, which get gradients as in plain
    torch, but no update."""

    groups: tuple[Group, ...]
    group_of: Mapping[str, int]
    own_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    def boundary(self, group: int) -> Boundary:
        """The boundary at which shards may cut the tensors of a group."""
        return self.groups[group].boundary

    @property
    def to_compare(self) -> dict[str, int | None]:
        """The group of each parameter (None: it is left out), which must be the same on every rank."""
        groups = {**self.group_of, **dict.fromkeys(self.left_out)}
        return {f"optimizer's group of {name}": group for name, group in groups.items()}

    def trains(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether an optimizer updates the parameter with this first name."""
        return parameter.requires_grad and name not in self.left_out


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of an interpolated
    momentum, with decoupled weight decay. One state of the parameter's size."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
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


def recipe(
    model: nn.Module, section: OptimizerSection, given: Optimizer | type[Optimizer] | Make | None = None
) -> Recipe:
    """Make the recipe of the config section, or of `given`: a torch optimizer class, which replaces the
    section's `name`; or a factory, called with the model's trainable parameters, which decides everything
    itself (groups, learning rates, options); or an optimizer of the model's parameters, with its groups.
    Parameters that are in no group of such an optimizer are left out, as by torch.

    A class that is not one of the section's names keeps its own defaults for those of betas, eps, momentum
    and nesterov that the section does not set. For a frozen model `given` is ignored. Raises ConfigError for
    an optimizer that cannot run here, and for options that it does not take; and ModelError for a model
    without parameters."""
    if not any(True for _ in model.parameters()):
        raise ModelError("the model has no parameters: there is nothing to train")
    if not any(p.requires_grad for p in model.parameters()):
        given = None
    if not (given is None or isinstance(given, Optimizer) or callable(given)):
        raise ConfigError([Problem("optimizer", type(given).__name__, "it is no torch optimizer",
                                   "pass one, its class, or a factory such as lambda "
                                   "params: torch.optim.AdamW(params, lr=3e-4)")])  # fmt: skip
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    own_dtypes = {
        name: p.dtype
        for name, p in model.named_parameters()
        if trained and p.is_floating_point() and p.dtype not in trained
    }
    if given is None or isinstance(given, type):
        return replace(
            _by_pattern(model, section, _from_section(model, section, given)), own_dtypes=own_dtypes
        )
    if section.groups:
        raise ConfigError([Problem("optimizer.groups", section.groups, "the factory that was passed "
                                                                       "as optimizer decides the groups",
                                   "leave optimizer.groups out, or pass the optimizer's class")])  # fmt: skip
    made = given if isinstance(given, Optimizer) else _called(model, given)
    return replace(_from_optimizer(model, made), own_dtypes=own_dtypes)


def maker(section: OptimizerSection, given: type[Optimizer] | None = None) -> Make:
    """Return a function that builds, over parameters or groups, the optimizer that the config section names,
    or the class `given` with the section's options. Raises ConfigError for muon, which is one optimizer for
    matrices and another for the rest."""
    if section.name == "muon" and given is None:
        raise ConfigError([Problem("optimizer.name", section.name, "it makes two optimizers, which go by the "
                                   "model", "leave the optimizer to the config")])  # fmt: skip
    return _maker(section, given)


def _maker(section: OptimizerSection, given: type[Optimizer] | None) -> Make:
    """Return a function that builds the section's class, or `given`, with the section's options."""
    adam = {"betas": section.betas, "eps": section.eps}
    ours: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, adam),
        "adam": (torch.optim.Adam, adam),
        "sgd": (torch.optim.SGD, {"momentum": section.momentum, "nesterov": section.nesterov}),
        "adagrad": (torch.optim.Adagrad, {"eps": section.eps}),
        "lion": (Lion, {"betas": section.betas}),
        "lamb": (Lamb, adam),
    }
    if given is None and section.name in ours:
        return _configured(ours[section.name][0], section, ours[section.name][1])
    written = {
        key: getattr(section, key)
        for key in section.model_fields_set & {"betas", "eps", "momentum", "nesterov"}
    }
    return _configured(given or getattr(torch.optim, section.name), section, written)


def _from_section(model: nn.Module, section: OptimizerSection, given: type[Optimizer] | None) -> Recipe:
    """Make the recipe of the section, or of the class `given`, without the section's `groups`."""
    spared, spare = _spared(model, section), {"weight_decay": 0.0}
    if given is None and section.name == "muon":
        whole = _matrices(model, section.matrices)
        muon = _configured(
            torch.optim.Muon, section, {"lr": section.matrix_lr, "momentum": section.matrix_momentum}
        )
        _boundary(muon, {2})
        adam = {"betas": section.betas, "eps": section.eps}
        rest = _configured(torch.optim.AdamW, section, adam, own_options=False)
        groups = (
            Group(rest, "element"),
            Group(rest, "element", spare),
            Group(muon, "tensor"),
            Group(muon, "tensor", spare),
        )
        return Recipe(
            groups, {name: 2 * (name in whole) + (name in spared) for name, _ in model.named_parameters()}
        )
    make = _maker(section, given)
    boundary = _boundary(make, {p.dim() for p in model.parameters() if p.requires_grad})
    return Recipe(
        (Group(make, boundary), Group(make, boundary, spare)),
        {n: int(n in spared) for n, _ in model.named_parameters()},
    )


def _by_pattern(model: nn.Module, section: OptimizerSection, made: Recipe) -> Recipe:
    """Add to `made` the section's `groups`: parameters that match a pattern move to a new group with the
    pattern's options. Raises ConfigError for patterns that match none."""
    names: dict[int, list[str]] = {}  # all names of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    groups, group_of, at = list(made.groups), dict(made.group_of), dict[tuple[int, str], int]()
    unmatched = set(section.groups)
    for own in names.values():
        matching = [pattern for pattern in section.groups if any(fnmatchcase(name, pattern) for name in own)]
        unmatched -= set(matching)
        if not matching:
            continue
        before, first = made.group_of[own[0]], matching[0]
        if (before, first) not in at:
            at[before, first] = len(groups)
            group = made.groups[before]
            own_options = {str(key): value for key, value in section.groups[first].items()}
            groups.append(replace(group, options={**group.options, **own_options}))
        group_of[own[0]] = at[before, first]
    every = [name for own in names.values() for name in own]
    if unmatched:
        raise ConfigError(
            [
                Problem(
                    f"optimizer.groups.{pattern}",
                    section.groups[pattern],
                    "no parameter of the model has such a name",
                    f"their names are such as {', '.join(get_close_matches(pattern, every, cutoff=0.0))}",
                )
                for pattern in section.groups
                if pattern in unmatched
            ]
        )
    return Recipe(tuple(groups), group_of)


def _configured(
    cls: type[Optimizer], section: OptimizerSection, arguments: Mapping[str, Any], own_options: bool = True
) -> Make:
    """Return a function that builds `cls` with the section's learning rate, weight decay and options. Raises
    ConfigError for options that it does not take."""
    taken = inspect.signature(cls).parameters
    options = {"lr": section.lr, "weight_decay": section.weight_decay, **arguments}
    options = {key: value for key, value in options.items() if key in taken}
    if own_options:
        unknown = sorted(set(section.options) - set(taken))
        if unknown:
            raise ConfigError(
                [
                    Problem(
                        f"optimizer.options.{key}",
                        section.options[key],
                        f"{cls.__name__} does not take it",
                        f"one of {', '.join(k for k in taken if k != 'params')}",
                    )
                    for key in unknown
                ]
            )
        options |= section.options
    return partial(cls, **_fused(cls, options))


def _called(model: nn.Module, factory: Make) -> Optimizer:
    """Call the caller's factory with the model's trainable parameters. Raises ConfigError where it fails."""
    try:
        made = factory([p for p in model.parameters() if p.requires_grad])
    except Exception as error:
        raise ConfigError(
            [
                Problem(
                    "optimizer",
                    getattr(factory, "__name__", factory),
                    f"the factory failed: {error}",
                    "it is called with a list of the trainable parameters",
                )
            ]
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigError([Problem("optimizer", made, "the factory did not return a torch optimizer",
                                   "pass a torch.optim class, or a function "
                                   "of a list of parameters that returns one")])  # fmt: skip
    return made


def _from_optimizer(model: nn.Module, made: Optimizer) -> Recipe:
    """Make the recipe with the groups of an optimizer of the model's own parameters."""
    named = dict(model.named_parameters())
    at = {id(p): index for index, group in enumerate(made.param_groups) for p in group["params"]}
    left_out = frozenset(name for name, p in named.items() if p.requires_grad and id(p) not in at)
    if not any(p.requires_grad and id(p) in at for p in named.values()):
        reason = "none of the model's parameters that require gradients is in a group of it"
        fix = "make it of model.parameters(), of the model as it is given to initialize"
        raise ConfigError([Problem("optimizer", type(made).__name__, reason, fix)])
    if left_out:
        names = [name for name in named if name in left_out]
        warn(
            f"the optimizer leaves out {', '.join(names[:3])} ({len(names)} in all), which stay as they are: "
            "requires_grad_(False) on them saves their gradients"
        )
    cls = type(made)
    taken = inspect.signature(cls).parameters
    make = partial(cls, **_fused(cls, {key: value for key, value in made.defaults.items() if key in taken}))
    groups = []
    for group in made.param_groups:
        options = _fused(
            cls,
            {
                key: value
                for key, value in group.items()
                if key not in ("params", "param_names", "initial_lr")
            },
        )
        if "initial_lr" in group:  # a scheduler may have changed lr already
            options["lr"] = group["initial_lr"]
        groups.append(Group(make, _boundary(make, {p.dim() for p in group["params"]}, options), options))
    return Recipe(tuple(groups), {name: at.get(id(p), 0) for name, p in named.items()}, left_out=left_out)


def warn_of_unused(section: OptimizerSection, given: object, made: Recipe) -> None:
    """Warn of keys of the section that are ignored, as the caller's own optimizer or factory, of which `made`
    is the recipe, has other values for them."""
    if given is None or isinstance(given, type) or not made.groups:
        return
    make = made.groups[0].make
    name = make.func.__name__ if isinstance(make, partial) else ""
    idle = [
        f"optimizer.{key} = {getattr(section, key)!r}"
        for key in OptimizerSection.model_fields
        if key in section.model_fields_set - {"clip", "unused", "states", "groups"}
        if any(
            {"name": name.lower(), **group.options}.get(key) != getattr(section, key) for group in made.groups
        )
    ]
    if idle:
        rates = ", ".join(dict.fromkeys(f"{float(group.options['lr']):g}" for group in made.groups))
        warn(
            f"{', '.join(idle)} of the config: unused, as the optimizer that was passed ({name}, lr {rates}) "
            "has its own options: set them there and remove these keys, or pass the optimizer's class"
        )


def refuse_foreign(model: nn.Module, given: object, known: Sequence[Tensor] = ()) -> None:
    """Raise ModelError where the caller's optimizer has a parameter that is not in the model, as nothing
    would update it. known: parameters that it had before, and that may have left the model."""
    if not isinstance(given, Optimizer):
        return
    own = {id(p) for p in (*model.parameters(), *known)}
    if given.state and not known:
        warn(
            f"the {type(given).__name__} has states of {len(given.state)} parameters, as of steps that it "
            "made, which the engine does not take over: it begins without. engine.load(path) goes on from "
            "what engine.save wrote, and engine.numbers(parameter).set_whole(name, tensor) sets a state"
        )
    for at, group in enumerate(given.param_groups):
        for p in group["params"]:
            if id(p) not in own and p.requires_grad:
                raise ModelError(
                    f"group {at} of the optimizer has a parameter of shape {tuple(p.shape)} that is none of "
                    "the model's, and would never be updated: make it a parameter of the module that is "
                    "given to initialize (a loss with parameters as a submodule), or take it out"
                )


def _fused(cls: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """Return `options`, with the fused kernel if `cls` has one and they choose no other implementation."""
    chosen = options.get("fused") is not None or options.get("foreach") or options.get("differentiable")
    return options if cls not in FUSED or chosen else {**options, "fused": True}


_FOUND: dict[str, Boundary] = {}
"""The boundaries found for torch's optimizers, by class, options and numbers of dimensions."""


def _boundary(make: Make, dims: AbstractSet[int], options: Mapping[str, Any] | None = None) -> Boundary:
    """Find out by trial where shards may cut tensors of these numbers of dimensions; once for each of torch's
    own classes. Raises ConfigError if the optimizer does not work."""
    if not (isinstance(make, partial) and make.func.__module__.startswith("torch.optim.")):
        return _tried(make, dims, options or {})
    key = repr((make, options, sorted(dims)))
    if key not in _FOUND:
        _FOUND[key] = _tried(make, dims, options or {})
    return _FOUND[key]


def _tried(make: Make, dims: AbstractSet[int], options: Mapping[str, Any]) -> Boundary:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4,) * dim for dim in sorted(dims or {2}) for _ in range(2)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    group = Group(make, "tensor", options)
    name = make.func.__name__ if isinstance(make, partial) else str(make)
    try:
        batched = _trial(group, tensors)
        changed = _changed_options(group)
        alone = torch.cat([_trial(group, [tensor]) for tensor in tensors])
    except Exception as error:  # a class of the caller's may raise anything
        reason = (
            f"it fails on tensors of {' or '.join(map(str, sorted(dims)))} "
            f"dimensions with its options: {error}"
        )
        raise ConfigError(
            [Problem("optimizer", name, reason, 'change the options, or use another one such as "adamw"')]
        ) from error
    if changed:
        reason = f"its step changes its groups' {', '.join(changed)}, and shards are updated one by one"
        fix = 'use an optimizer that keeps what it counts in the states of parameters, such as "adamw"'
        raise ConfigError([Problem("optimizer", name, reason, fix)])
    if not _same(batched, alone):
        raise ConfigError([Problem("optimizer", name, "its update of one tensor depends on "
                                                      "the others, which are in other buckets",
                                   'use an optimizer that treats '
                                   'tensors one by one, such as "adamw"')])  # fmt: skip
    try:
        cut = _trial(group, [half for tensor in tensors for half in tensor.flatten().chunk(2)])
    except Exception:  # such as Muon's, which takes matrices only
        return "tensor"
    states = trial_state(group, None, torch.float64).values()
    spread = all(state.shape == (ALIGN,) for state in states if isinstance(state, Tensor) and state.dim())
    return "element" if spread and _same(batched, cut) else "tensor"


def _trial(group: Group, tensors: Sequence[Tensor]) -> Tensor:
    """Update copies of `tensors` in three steps, with elementwise gradients. Returns all their numbers."""
    copies = [tensor.clone() for tensor in tensors]
    made = group.optimizer(copies)
    made.param_groups[0]["lr"] = 0.1  # with 0, as a warm-up begins, nothing would change
    for step in range(3):
        for copy in copies:
            copy.grad = torch.sin(7 * copy + step)
        made.step()
    return torch.cat([copy.flatten() for copy in copies])


def _changed_options(group: Group) -> list[str]:
    """The options that a step of the group's optimizer itself changes, as in schedule-free optimizers."""
    tensor = torch.ones(4, 4, dtype=torch.float64)
    tensor.grad = tensor.clone()
    made = group.optimizer([tensor])
    options = made.param_groups[0]
    before = {key: repr(value) for key, value in options.items() if key != "params"}
    made.step()
    return [key for key, value in options.items() if key != "params" and repr(value) != before.get(key)]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def _matrices(model: nn.Module, wanted: Literal["blocks"] | Sequence[str]) -> set[str]:
    """The names of the parameters that Muon updates. Raises ConfigError for patterns that match no matrix."""
    if wanted == "blocks":
        return matrices(model)
    names = [name for name, p in model.named_parameters() if p.dim() == 2]
    if idle := [pattern for pattern in wanted if not any(fnmatchcase(name, pattern) for name in names)]:
        raise ConfigError([Problem("optimizer.matrices", pattern, "no matrix of the model has such a name",
                                   "correct the pattern, or remove it") for pattern in idle])  # fmt: skip
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)}


def _spared(model: nn.Module, section: OptimizerSection) -> set[str]:
    """The names of the parameters without weight decay."""
    if section.no_decay == "none":
        return set()
    if section.no_decay == "vectors":
        return no_decay(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in section.no_decay)}
