"""Where things are in a model: its repeated blocks, and what its forward and its loss expect. The one file that knows Hugging Face names.

Pure: looks at modules and signatures, changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.errors import ConfigError, ModelError, Problem

IGNORED_LABEL = -100
"""The label that takes no part in a loss, in torch and in transformers."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, by name in registration order: the elements of the largest outermost ModuleList, and of every other one
    that holds a tenth of the model's parameters (an encoder beside a decoder). Without a ModuleList, of nn.Sequential alike."""
    total = sum(p.numel() for p in model.parameters())
    for kind in (nn.ModuleList, nn.Sequential):
        found: dict[str, nn.Module] = {}
        lists: list[str] = []
        for name, module in model.named_modules():
            nested = any(name.startswith(outer + ".") for outer in lists)
            if nested or not isinstance(module, kind) or len(module) < 2 or module is model:
                continue
            if sum(p.numel() for p in module.parameters()) * 10 >= total > 0:
                lists.append(name)
                for child, block in module.named_children():
                    if any(True for _ in block.parameters()):
                        found[f"{name}.{child}"] = block
        if found:
            return found
    return {}


@dataclass(frozen=True)
class ForwardSignature:
    """What a model's forward takes: the names of its parameters, and whether it takes any others."""

    names: frozenset[str]
    any_name: bool

    @classmethod
    def of(cls, model: nn.Module) -> ForwardSignature:
        parameters = inspect.signature(model.forward).parameters.values()
        return cls(
            frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)),
            any(p.kind == p.VAR_KEYWORD for p in parameters),
        )


def training_arguments(model: nn.Module) -> dict[str, Any]:
    """Arguments that a Hugging Face model wants in training whatever the batch: no key-value cache, which only generation reads
    (and which a recomputed block would fill twice)."""
    config = getattr(model, "config", None)
    return {"use_cache": False} if hasattr(config, "use_cache") and "use_cache" in ForwardSignature.of(model).names else {}


def count_labels(model: nn.Module, batch: object) -> int | None:
    """How many labels of `batch` the model's own loss is the mean of; None where the batch carries no `labels` tensor.

    A causal language model predicts the next token, so the first label of each sequence is never predicted."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if getattr(model, "loss_type", None) == "ForCausalLM" and labels.dim() >= 2:
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def count_tokens(batch: object) -> int:
    """Positions of the batch's `input_ids`, or 0 for a batch that is not text."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else 0


def no_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay should leave alone by default: vectors and scalars, which all norms and biases are."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.dim() < 2}


def matrices(model: nn.Module) -> set[str]:
    """Names of the block's weight matrices: what Muon is for. Embeddings, heads and everything outside the blocks are not among them."""
    inside = tuple(name + "." for name in find_blocks(model))
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return {n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith(inside) and id(p) not in embeddings} if inside else set()


def build(path: str | None, config: Mapping[str, Any] | None, trust_remote_code: bool = False, vocab_size: int | None = None) -> nn.Module:
    """A Hugging Face model: from the directory `path` with its weights in float32, or newly initialised from `config`, a transformers
    config as a mapping with `model_type`. `vocab_size` fills in the tokenizer's where the config gives none.

    Raises ConfigError where neither can be built.
    """
    import transformers

    if path is not None:
        if not (Path(path) / "config.json").is_file():
            raise ConfigError([Problem("model.path", path, "is not a Hugging Face model directory (no config.json in it)",
                                       "give a directory that save_pretrained wrote, or model.config")])  # fmt: skip
        loaded = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return _architecture(loaded).from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return skeleton(None, config, trust_remote_code, vocab_size)


def skeleton(
    path: str | None, config: Mapping[str, Any] | None, trust_remote_code: bool = False, vocab_size: int | None = None
) -> nn.Module:
    """The model that `build` builds, newly initialised in any case: under `torch.device("meta")`, its shapes alone."""
    import transformers

    if path is not None:
        return _new(transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    values = dict(config or {})
    kind = values.pop("model_type", None)
    if vocab_size is not None:
        values.setdefault("vocab_size", vocab_size)
    try:
        return _new(transformers.AutoConfig.for_model(kind, **values))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError([Problem("model.config", dict(config or {}), f"transformers cannot build it: {error}",
                                   "write the keys of that model's transformers config")]) from error  # fmt: skip


def _new(config: Any) -> nn.Module:
    return _architecture(config).from_config(config)


def _architecture(config: Any) -> Any:
    """The Auto class for a config: what its `architectures` names, else a causal language model."""
    import transformers

    names = getattr(config, "architectures", None) or []
    for name in names:
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModelForSeq2SeqLM,
                     transformers.AutoModelForSequenceClassification, transformers.AutoModelForImageClassification):  # fmt: skip
            if any(name in (cls if isinstance(cls, tuple) else (cls,)) for cls in auto._model_mapping._model_mapping.values()):
                return auto
    if names:
        raise ModelError(f"no Auto class of transformers builds {names[0]}: build the model in Python and pass it to initialize()")
    return transformers.AutoModelForCausalLM
