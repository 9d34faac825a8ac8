"""Translate the sections optimizer and scheduler of a DeepSpeed config to keys of Polyreme's.

Arguments of an optimizer that are left out have the defaults of the class that DeepSpeed would make."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from polyreme.compat.deepspeed.config_keys import Outcome
from polyreme.config.schema import OPTIONS, OptimizerSection
from polyreme.errors import Problem

Remarks = dict[str, tuple[Outcome, str]]
"""Remarks on keys, which count before those of the table: the outcome and a sentence for each."""

SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
"""DeepSpeed's own learning rate schedules."""
OWN = ("adam", "adamw", "lion", "adagrad", "muon", "lamb", "muadam", "muadamw", "musgd")
"""Optimizers that DeepSpeed knows in any spelling; others are names of torch.optim."""
GONE = ("onebitadam", "onebitlamb", "zerooneadam")
WITHOUT = {
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "muP scales rates by the widths of layers, which a shard "
                                                    "does not know"),
    **dict.fromkeys(GONE, "DeepSpeed 0.19 has removed it"),
}  # fmt: skip
"""The reasons why optimizers are refused, by their names."""
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adamw": ADAM,
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "lamb": ADAM,
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "muon": {"momentum": 0.95, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0},
}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias_correction": (True,),
    "amsgrad": (False,),
    "set_grad_none": (True, False),
    "fp32_optimizer_states": (True, None),
    "per_head_muon": (False,),
    "torch_adam": (False,),
}
"""Arguments of DeepSpeed's own optimizers that change nothing at these values."""
ARGUMENTS: dict[str, frozenset[str]] = {
    "adam": frozenset({"bias_correction", "amsgrad", "set_grad_none", "fp32_optimizer_states", "torch_adam"}),
    "lion": frozenset({"set_grad_none", "fp32_optimizer_states"}),
    "lamb": frozenset({"amsgrad"}),
    "adagrad": frozenset({"amsgrad", "fp32_optimizer_states"}),
    "muon": frozenset({"per_head_muon", "torch_adam", "fp32_optimizer_states"}),
}
ARGUMENTS["adamw"] = ARGUMENTS["adam"]
STATES = "optimizer.params.fp32_optimizer_states"
MUON = {"lr", "muon_lr", "adam_lr", "ns_method", "adam_w_mode"}
"""Arguments of Muon that change its updates, and have another name in Polyreme's config."""


@dataclass(frozen=True)
class Named:
    """The name of a class, and its keyword arguments as they were written."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


def named(values: Any, section: str, problems: list[Problem]) -> Named | None:
    """Return the class that a section names by its keys type and params; None without the section."""
    name, params = values[f"{section}.type"], dict(values[f"{section}.params"])
    if name is None:
        if params:
            problems.append(
                Problem(f"{section}.params", params, "of which class, is not said", f"write {section}.type")
            )
        return None
    for key, value in params.items():
        if isinstance(value, str) and value == "auto":
            reason = '"auto" is for the Trainer and Accelerate to fill in, and nobody did'
            problems.append(
                Problem(f"{section}.params.{key}", value, reason, "write a value, or leave it out")
            )
    lowered = name.lower()
    return Named(lowered if section == "optimizer" and lowered in OWN else name, params)


def check_scheduler(scheduler: Named, problems: list[Problem]) -> None:
    """Add a problem for a schedule that neither DeepSpeed nor torch has, and for arguments that it does not
    take or lacks."""
    from torch.optim import lr_scheduler  # only here: most configs are shown without it

    from polyreme.compat.deepspeed.runtime import lr_schedules

    known = [name for name in lr_scheduler.__all__ if inspect.isclass(getattr(lr_scheduler, name))]
    if scheduler.name not in {*SCHEDULERS, *known}:
        reason = "neither a schedule of DeepSpeed nor a class of torch.optim.lr_scheduler"
        near = difflib.get_close_matches(scheduler.name, [*SCHEDULERS, *known], n=1, cutoff=0)[0]
        problems.append(Problem("scheduler.type", scheduler.name, reason, f"did you mean {near}?"))
        return
    owner = lr_schedules if scheduler.name in SCHEDULERS else lr_scheduler
    _, *takes = inspect.signature(getattr(owner, scheduler.name)).parameters.values()
    names = {each.name for each in takes if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    for key in () if len(names) < len(takes) else scheduler.params.keys() - names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0)[0]
        reason = f"{scheduler.name} takes no such argument"
        problems.append(
            Problem(f"scheduler.params.{key}", scheduler.params[key], reason, f"did you mean {near}?")
        )
    for each in takes:
        if each.name in names and each.default is each.empty and each.name not in scheduler.params:
            reason = f"{scheduler.name} cannot do without it"
            problems.append(Problem(f"scheduler.params.{each.name}", None, reason, "write a value"))


def optimizer_keys(optimizer: Named, problems: list[Problem], remarks: Remarks) -> dict[str, Any]:
    """Return the keys of Polyreme's section optimizer, without "optimizer.", that make the same updates."""
    params = dict(optimizer.params)
    if "max_grad_norm" in params:
        problems.append(
            Problem(
                "optimizer.params.max_grad_norm",
                params.pop("max_grad_norm"),
                "an optimizer does not clip",
                "write gradient_clipping at the top level",
            )
        )
    name = optimizer.name
    if name.lower() in WITHOUT:
        problems.append(Problem("optimizer.type", name, WITHOUT[name.lower()], 'write "AdamW"'))
        return {}
    if name in ("adam", "adamw"):
        decoupled = params.pop("adam_w_mode", True) or name == "adamw"
        name = "adamw" if decoupled else "adam"
        if params.get("torch_adam") is True:
            del params["torch_adam"]
            if not params.pop("fp32_optimizer_states", True):
                remarks[STATES] = ("warned", "the optimizer's states stay fp32")
            return _of_torch("AdamW" if decoupled else "Adam", name, params, problems)
    if name == "muon":
        return _muon(params, problems, remarks)
    if name in DEFAULTS:
        extra = OPTIONS.get(name, set())
        if name == "adagrad":
            extra = _of_torch_class("Adagrad") - {"lr", "eps", "weight_decay"}
        options = {key: params.pop(key) for key in list(params) if key in extra}
        _drop_harmless(name, params, problems, remarks)
        return {"name": name, **DEFAULTS[name], **params, **({"options": options} if options else {})}
    return _of_torch(name, name.lower() if name == "SGD" else name, params, problems)


def _nearest(key: str, known: AbstractSet[str]) -> str:
    """Return the argument of an optimizer that a misspelt one is likely to stand for."""
    return "lr" if key == "learning_rate" else difflib.get_close_matches(key, known, n=1, cutoff=0)[0]


def _drop_harmless(name: str, params: dict[str, Any], problems: list[Problem], remarks: Remarks) -> None:
    """Remove from `params` the arguments that change nothing and those that are refused."""
    known = DEFAULTS[name].keys() | ARGUMENTS[name] | (MUON if name == "muon" else set())
    for key in list(params):
        if key in DEFAULTS[name] or (name == "muon" and key in MUON):
            continue
        value, path = params.pop(key), f"optimizer.params.{key}"
        if key not in known:
            near = _nearest(key, known)
            reason = f"DeepSpeed's {name} takes no such argument"
            problems.append(Problem(path, value, reason, f"did you mean {near}?"))
        elif key == "fp32_optimizer_states" and not value:
            remarks[STATES] = ("warned", "the optimizer's states stay fp32")
        elif not any(value is fine for fine in HARMLESS[key]) and not (
            name == "muon" and key == "torch_adam"
        ):
            fix = "remove it" + (
                ', or write "torch_adam": true' if key == "amsgrad" and name != "adagrad" else ""
            )
            problems.append(Problem(path, value, f"there is no {name} with it", fix))


def _muon(params: dict[str, Any], problems: list[Problem], remarks: Remarks) -> dict[str, Any]:
    """Return Polyreme's keys for Muon, which updates matrices, with AdamW for the other parameters."""
    if not params.pop("adam_w_mode", True):
        reason = "what is no matrix is updated by AdamW"
        problems.append(Problem("optimizer.params.adam_w_mode", False, reason, "remove it"))
    _drop_harmless("muon", params, problems, remarks)
    params.pop("ns_method", None)
    shared = params.pop("lr", None)
    rates = {
        "matrix_lr": params.pop("muon_lr", 0.02 if shared is None else shared),
        "lr": params.pop("adam_lr", 3e-4 if shared is None else shared),
    }
    made = {"name": "muon", **rates, **DEFAULTS["muon"], **params}
    made["matrix_momentum"] = made.pop("momentum")
    remarks.setdefault(
        "optimizer.type",
        (
            "warned",
            "Muon updates matrices, but for those named embed or lm_head, by torch's Newton-Schulz "
            "iteration in bf16; AdamW the rest, kernels of convolutions too",
        ),
    )
    return made


def _of_torch_class(name: str) -> set[str]:
    import torch

    return set(inspect.signature(getattr(torch.optim, name)).parameters) - {"params"}


def _of_torch(
    class_name: str, ours: str, params: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Return Polyreme's keys for a class of torch.optim, whose defaults count. Arguments without a key of
    their own are its options."""
    import torch

    base = torch.optim.Optimizer
    known = [
        n for n, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, base)
    ]
    if class_name not in known or class_name == "Optimizer":
        choices = {known_name.lower(): known_name for known_name in [*known, "Adam", "Lion"]}
        stem = class_name.lower().replace("fused", "").replace("deepspeedcpu", "").replace("cpu", "")
        near = choices[difflib.get_close_matches(stem, choices, n=1, cutoff=0)[0]]
        reason = "neither an optimizer of DeepSpeed's config nor a class of torch.optim"
        problems.append(Problem("optimizer.type", class_name, reason, f'write "{near}"'))
        return {}
    signature = inspect.signature(getattr(torch.optim, class_name)).parameters
    made: dict[str, Any] = {"name": ours}
    options: dict[str, Any] = {}
    for key, value in params.items():
        if key not in signature or key == "params":
            near = _nearest(key, signature.keys() - {"params"})
            reason = f"torch.optim.{class_name} takes no such argument"
            problems.append(Problem(f"optimizer.params.{key}", value, reason, f"did you mean {near}?"))
        elif value is None:
            continue  # as torch chooses
        elif key in OptimizerSection.model_fields and not (class_name == "Adafactor" and key == "eps"):
            made[key] = value
        else:
            options[key] = value
    for key in ("lr", "weight_decay", "betas", "eps", "momentum"):
        default = signature[key].default if key in signature else None
        if isinstance(default, int | float | tuple) and not (class_name == "Adafactor" and key == "eps"):
            made.setdefault(key, list(default) if isinstance(default, tuple) else float(default))
    return {**made, **({"options": options} if options else {})}
