"""Finds the adapters that PEFT puts into a model, or the prompts before its inputs. The only file that knows
PEFT's names.

Reads modules and folders, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.errors import ModelError
from polyreme.models.tensor_access import entries


def plain_model(model: nn.Module) -> nn.Module:
    """Return the model that PEFT's adapters were put into; any other model itself."""
    return model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is a PeftModel, which is a wrapper around the model with the adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_adapters(model: nn.Module) -> bool:
    """Whether it is a PeftModel, or a model of transformers after `add_adapter`: both can save their
    adapters."""
    return is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False)


def refuse_bare_base(model: nn.Module) -> None:
    """Raise ModelError for a Hugging Face model whose layers PEFT wrapped, but that is not the one that can
    save the adapters."""
    if (
        hasattr(model, "save_pretrained")
        and not has_adapters(model)
        and (wrapped := list(adapted_layers(model)))
    ):
        raise ModelError(f"PEFT has wrapped {wrapped[0]} of this {type(model).__name__}, "
                         "whose checkpoints nothing could open: train the "
                         "model that get_peft_model returns (give it to initialize(), "
                         "or assign it to engine.module), not the one that it "
                         "was made from")  # fmt: skip


def adapters(model: nn.Module, absent: Iterable[str] = ()) -> set[str]:
    """Return the names of the parameters and buffers in PEFT's files of all adapters; none for any other
    model.
    absent: names of those that other pipeline stages have."""
    if not has_adapters(model):
        return set()
    if learns_prompts(model):
        return {name for name in (*entries(model), *absent) if name.startswith("prompt_encoder.")}
    from peft import get_peft_model_state_dict

    empty = {name: torch.empty(0, device="meta") for name in (*entries(model), *absent)}
    # PEFT reads only names, of parameters whose numbers may be released
    with torch._C.DisableTorchFunctionSubclass():
        saved = [
            get_peft_model_state_dict(model, empty, name, save_embedding_layers=False)
            for name in model.peft_config  # type: ignore[union-attr]
        ]
    selected = {id(tensor) for each in saved for tensor in each.values()}
    return {name for name, tensor in empty.items() if id(tensor) in selected}


def refuse_adapter(folder: Path) -> None:
    """Raise ModelError for a model's folder that has an adapter beside its weights, or only an adapter."""
    if not (folder / "adapter_config.json").is_file():
        return
    trained = "initialize(peft.PeftModel.from_pretrained({}, {}, is_trainable=True), ...) trains it"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has an adapter alone (adapter_config.json), not the model that it is for: "
            + trained.format("that model", repr(str(folder)))
        )
    raise ModelError(
        f"{folder} has an adapter beside its weights (adapter_config.json), which would not be applied: move "
        "adapter_config.json and adapter_model.safetensors to a folder of their own. Then the weights are "
        f"trained without it, and {trained.format('model', 'that folder')}; a model with both in one is what "
        "merge_and_unload() returns, saved by save_pretrained"
    )


@dataclass(frozen=True)
class Adapted:
    """The names of the modules in a layer that PEFT wrapped. base: the layer itself. kind: of adapters, such
    as "LoRA". Of LoRA, down, up: the linear layers to each adapter's low rank and back; dropouts: those
    before `down`."""

    base: str
    kind: str
    down: Sequence[str] = ()
    up: Sequence[str] = ()
    dropouts: Sequence[str] = ()


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Return the layers that PEFT wrapped, by name."""
    found = {}
    for name, module in model.named_modules():
        base = next((each for each in ("base_layer", "original_module") if each in module._modules), None)
        if base is None or not type(module).__module__.startswith("peft."):
            continue
        kind = type(module).__module__.removeprefix("peft.").removeprefix("tuners.").partition(".")[0]
        if kind == "lora" and type(module).__name__ == "Linear":
            variants = {type(variant).__name__ for variant in module.lora_variant.values()}
            inside = [
                [
                    f"{name}.{key}.{each}"
                    for each, inner in module.get_submodule(key).named_children()
                    if not isinstance(inner, nn.Identity)
                ]
                for key in ("lora_A", "lora_B", "lora_dropout")
            ]
            found[name] = Adapted(f"{name}.{base}", ", ".join(sorted(variants)) or "LoRA", *inside)
        else:
            found[name] = Adapted(
                f"{name}.{base}",
                type(module).__name__ if kind == "utils" else f"{kind} {type(module).__name__}",
            )
    return found


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return the names that modules have without PEFT's wrappers and adapters, by their names with them.
    Wrappers and adapters themselves are left out."""
    modules, plain = dict(model.named_modules()), plain_model(model)
    adapted = adapted_layers(model)
    prefix = next(f"{name}." if name else "" for name, module in modules.items() if module is plain)
    found = {}
    for name in modules:
        if name in adapted or not (f"{name}.".startswith(prefix) or name == ""):
            continue
        words = name.split(".")
        outer = next(
            (each for end in range(1, len(words)) if (each := ".".join(words[:end])) in adapted), None
        )
        if outer is None:
            found[name] = name.removeprefix(prefix)
        elif name == adapted[outer].base or name.startswith(adapted[outer].base + "."):
            found[name] = outer.removeprefix(prefix) + name.removeprefix(adapted[outer].base)
    return found


def learns_prompts(model: nn.Module) -> bool:
    """Whether PEFT puts learned prompts before the model's inputs."""
    configs: Any = model.peft_config if is_peft_model(model) else {}
    return any(config.is_prompt_learning for config in configs.values())


def learns_keys(model: nn.Module) -> bool:
    """Whether PEFT gives every attention learned keys and values (prefix tuning)."""
    configs: Any = model.peft_config if is_peft_model(model) else {}
    return any(config.peft_type in ("PREFIX_TUNING", "CARTRIDGE") for config in configs.values())


def prompts(model: nn.Module) -> dict[str, Tensor]:
    """Compute the prompt in PEFT's file of each adapter, by its name. The parameters named by `adapters` must
    be in memory."""
    with torch.random.fork_rng():  # an encoder may have dropout
        return {name: model.get_prompt_embedding_to_save(name).clone() for name in model.peft_config}  # type: ignore[union-attr, operator]
