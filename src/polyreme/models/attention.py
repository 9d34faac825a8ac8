"""The attention of transformers' models: what of it is known before it is called, what stands against cutting
its sequences, and how another function takes its place.

Communication: none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from polyreme.models.huggingface import (
    ForwardSignature,
    find_blocks,
    register_attention,
    takes_from_all_blocks,
)
from polyreme.models.peft import plain_model

ATTENDS = ("full_attention", "sliding_attention", "sliding_window", "attention")
"""The `layer_types` of transformers configs that see keys by their places alone."""
MIXERS = (
    *("Mamba", "SSM", "DeltaNet", "LinearAttention", "Lightning", "ShortConv", "Recurrent"),
    *("Rwkv", "RWKV", "Retention"),
)
"""Parts of the names of classes that mix the tokens of a sequence without attention."""
LENGTHS = ("dynamic", "longrope")
"""Types of rotary tables that depend on the longest position of a call."""


@dataclass(frozen=True)
class Obstacle:
    """What stands against cutting the sequences of a model, and what to do."""

    reason: str
    fix: str


@dataclass(frozen=True)
class AttentionFacts:
    """What a config says of attention. pair: operations of a query with a key, in all layers; token: those of
    a token outside of attention. window: the keys that a query sees in every layer; None: all."""

    heads: int
    key_heads: int
    pair: float
    token: float
    causal: bool
    window: int | None


def facts_of(model: nn.Module) -> AttentionFacts:
    """Return what the config of a transformers model says."""
    plain = plain_model(model)
    config: Any = plain.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    types = {*(getattr(config, "layer_types", None) or ())}
    window = getattr(config, "sliding_window", None)
    everywhere = not types or types == {"sliding_attention"}
    if getattr(config, "use_sliding_window", True) is False or not everywhere:
        window = None
    modules = [module for module in plain.modules() if hasattr(module, "is_causal")]
    return AttentionFacts(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        4.0 * heads * width * config.num_hidden_layers,
        2.0 * sum(parameter.numel() for parameter in plain.parameters()),
        all(module.is_causal for module in modules),
        window,
    )


def replace_attention(model: nn.Module, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Have a transformers model call `function`, under this name, as its attention. Returns what undoes
    it."""
    found = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    return register_attention([*found.values()], name, function)


def obstacles(model: nn.Module, off: str) -> Iterator[Obstacle]:
    """Yield all that is known to stand against cutting the sequences of a model, or separating their
    documents. off: what to write in the config to leave that out."""
    plain: Any = plain_model(model)
    config, name = getattr(plain, "config", None), type(plain).__name__
    fix = f"write {off}"
    if not getattr(type(plain), "_supports_attention_backend", False) or config is None:
        yield Obstacle(f"{name} computes attention by itself, out of reach of another function", fix)
        return
    if "position_ids" not in ForwardSignature.of(plain).names or getattr(config, "is_encoder_decoder", False):
        yield Obstacle(f"{name} takes no position_ids, and would count each part from its beginning", fix)
    for tower in ("vision_config", "audio_config"):
        if getattr(config, tower, None) is not None:
            yield Obstacle(f"{name} has a {tower}, and its images or sounds are not cut", fix)
    if takes_from_all_blocks(plain) == "output_router_logits":
        yield Obstacle(
            "the router's balance loss is no sum over parts of a sequence",
            f"set output_router_logits = False in the model's config, or {off}",
        )
    text = config.get_text_config()
    yield from _of_config(text, name, off)
    yield from _of_modules(plain, fix)


def _of_config(text: Any, name: str, off: str) -> Iterator[Obstacle]:
    fix = f"write {off}"
    if others := {*(getattr(text, "layer_types", None) or ())} - {*ATTENDS}:
        kinds = ", ".join(sorted(others))
        yield Obstacle(f"{name} has layers of {kinds}, which see tokens of other ranks and documents", fix)
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    if found := ropes & {*LENGTHS}:
        reason = f"{found.pop()} rotary tables depend on the longest position of all ranks and documents"
        yield Obstacle(reason, fix)
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(text, key, 0):
            reason = f"{key} = {getattr(text, key)} would drop other pairs of tokens on each rank"
            yield Obstacle(reason, f"set {key} = 0.0 in the model's config, or {off}")


def _of_modules(model: nn.Module, fix: str) -> Iterator[Obstacle]:
    classes = {type(module) for block in find_blocks(model).values() for module in block.modules()}
    for kind in sorted(classes, key=lambda each: each.__name__):
        name = kind.__name__
        if any(word in name for word in MIXERS) or issubclass(kind, nn.Conv1d):
            reason = f"{name} mixes tokens without attention, of a part of the sequence and of all documents"
            yield Obstacle(reason, fix)
        elif ("attention" in name.lower() or "indexer" in name.lower()) and _counts(kind):
            yield Obstacle(f"{name} counts positions from the beginning of the part that it gets", fix)
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield Obstacle("its positions begin after that of padding, and depend on padding before them", fix)


def _counts(kind: type[nn.Module]) -> bool:
    """Return whether a forward calls `arange`, by which it counts positions itself."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "arange" in code.co_names
