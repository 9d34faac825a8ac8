"""The attention of transformers' models: what of it is known before it is called, what stands against cutting
its sequences, and how another function takes its place.

Communication: none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.models.huggingface import find_blocks, register_attention, shifts_labels, takes_from_all_blocks
from polyreme.models.peft import plain_model

KNOWN = (
    *("full_attention", "sliding_attention", "sliding_window", "attention", "chunked_attention"),
    *("linear_attention", "conv", "mamba", "recurrent", "hybrid", "mlp", "moe", "sparse", "dense"),
)
"""The `layer_types` of transformers configs whose tokens see keys by their places alone, or none but by a
mixer."""
MIXERS = (
    *("Mamba", "SSM", "DeltaNet", "DeltaAttention", "LinearAttention", "Lightning", "ShortConv", "Rglru"),
    *("Recurrent", "Rwkv", "RWKV", "Retention", "LSTMLayer"),
)
"""Parts of the names of classes that mix the tokens of a sequence without attention."""
POINTWISE = ("mlp", "moe", "sparse", "dense")
"""What blocks that mix no tokens have for their `block_type`."""
LENGTHS = ("dynamic", "longrope")
"""Types of rotary tables that depend on the longest position of a call."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""By which an attention of transformers calls another function."""


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
    heads = getattr(config, "num_attention_heads", None) or 1  # none where all is done by mixers
    widths = [getattr(module, "head_dim", None) for module in plain.modules()]
    width = next((each for each in widths if isinstance(each, int)), config.hidden_size // heads)
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


def text_model(model: nn.Module) -> nn.Module | None:
    """Return the part of a model of images or sounds that gets the embeddings of all tokens; None for any
    other model."""
    plain: Any = plain_model(model)
    if plain.config.get_text_config() is plain.config:
        return None
    found: nn.Module = plain.get_decoder()
    return None if found in (plain, plain.base_model) else found


def mixers(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in `blocks` that mix tokens without attention."""
    found: list[nn.Module] = []
    for block in blocks:
        inside: set[nn.Module] = {block}  # of a mixer: its own norms and convolutions
        for module in block.modules():
            if module not in inside and _mixes(module):
                found.append(module)
                inside |= {*module.modules()}
    return found


def _mixes(module: nn.Module) -> bool:
    name = type(module).__name__
    named = any(word in name for word in MIXERS) and "Norm" not in name and not _attends(module)
    return named or any(isinstance(child, nn.Conv1d) for child in module.children())


def mixes_none(block: nn.Module) -> bool:
    """Whether a block says that it is an MLP, or experts, alone."""
    return getattr(block, "block_type", None) in POINTWISE


def rotary_by_length(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose rotary tables depend on the longest position of a call."""
    kinds = [(module, getattr(module, "rope_type", None)) for module in model.modules()]
    return [
        module
        for module, kind in kinds
        if {*LENGTHS} & ({*kind.values()} if isinstance(kind, dict) else {kind})
    ]


def counting_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """Return the embeddings of positions that count these by themselves, in models that take none."""
    if takes(model, "position_ids"):
        return []
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return [each for each in tables if {"arange"} <= {*_names(each)}]


def takes(model: nn.Module, name: str) -> bool:
    """Return whether a model's own forward takes an argument of this name."""
    return name in inspect.signature(type(plain_model(model)).forward).parameters


def ignores(model: nn.Module, name: str) -> bool:
    """Return whether a model of transformers gets an argument of this name, and does not read it."""
    config = getattr(plain_model(model), "config", None)
    return hasattr(config, "get_text_config") and not takes(model, name)


def first_position(model: nn.Module) -> int:
    """Return the position of a sequence's first token."""
    found = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
    return next((int(module.padding_idx) + 1 for module in found), 0)  # type: ignore[arg-type]


def filler(model: nn.Module) -> int:
    """Return the token that pads sequences."""
    config: Any = plain_model(model).config
    return int(getattr(config.get_text_config(), "pad_token_id", None) or 0)


def chunk_of(module: nn.Module) -> int | None:
    """Return the tokens of a chunk, where queries of an attention see keys of their chunk alone."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    at = getattr(module, "layer_idx", None)
    chunked = at is not None and at < len(kinds) and kinds[at] == "chunked_attention"
    return config.attention_chunk_size if chunked else None


@dataclass(frozen=True)
class Temperature:
    """Scales queries by their positions, as Llama 4 does where it has no rotary positions."""

    floor: float
    scale: float

    @classmethod
    def of(cls, module: Any) -> Temperature | None:
        """Return that of an attention, which counts positions by itself."""
        if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
            return None
        return cls(module.floor_scale, module.attn_scale)

    def __call__(self, query: Tensor, place: Tensor) -> Tensor:
        """Return queries, (samples, heads, tokens, width), scaled by their places, (samples, tokens)."""
        steps = torch.floor((place.to(query.device).float() + 1) / self.floor)  # in float32, as there
        scales = torch.log1p(steps) * self.scale + 1
        return (query * scales[:, None, :, None]).to(query.dtype)


# ---- what stands against cutting


def obstacles(model: nn.Module, off: str) -> Iterator[Obstacle]:
    """Yield all that is known to stand against cutting the sequences of a model, or separating their
    documents. off: what to write in the config to leave that out."""
    plain: Any = plain_model(model)
    config, name = getattr(plain, "config", None), type(plain).__name__
    fix = f"write {off}"
    if config is None or not hasattr(config, "get_text_config"):
        yield Obstacle(f"{name} is no model of transformers, whose attention another function can be", fix)
        return
    text = text_model(plain) or plain
    blocks = find_blocks(text).values()
    attentive = [block for block in blocks if not mixes_none(block) and not mixers([block])]
    if attentive and not any(_attends(module) for block in attentive for module in block.modules()):
        yield Obstacle(f"{name} computes attention by itself, out of reach of another function", fix)
        return
    places = takes(text, "position_ids") or counting_embeddings(text) or not attentive
    if not places or getattr(config, "is_encoder_decoder", False):
        yield Obstacle(f"{name} takes no position_ids, and would count each part from its beginning", fix)
    if text is plain and config.get_text_config() is not config:
        yield Obstacle(f"{name} has no model of texts by itself, before which images could be cut", fix)
    if text is not plain and not shifts_labels(plain):
        yield Obstacle(f"{name} computes its loss by itself, of whole sequences", fix)
    if takes_from_all_blocks(plain) == "output_router_logits":
        yield Obstacle(
            "the router's balance loss is no sum over parts of a sequence",
            f"set output_router_logits = False in the model's config, or {off}",
        )
    yield from _of_config(config.get_text_config(), name, off)
    yield from _of_modules(blocks, fix)


def _attends(module: nn.Module) -> bool:
    """Return whether another function can be the attention that a module's forward computes."""
    return INTERFACE in _names(module)


def _names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what a module's forward calls."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _of_config(text: Any, name: str, off: str) -> Iterator[Obstacle]:
    if others := {*(getattr(text, "layer_types", None) or ())} - {*KNOWN}:
        kinds = ", ".join(sorted(others))
        reason = f"{name} has layers of {kinds}, which see tokens of other ranks and documents"
        yield Obstacle(reason, f"write {off}")
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(text, key, 0):
            reason = f"{key} = {getattr(text, key)} would drop other pairs of tokens on each rank"
            yield Obstacle(reason, f"set {key} = 0.0 in the model's config, or {off}")


def _of_modules(blocks: Iterable[nn.Module], fix: str) -> Iterator[Obstacle]:
    counting = {
        type(module).__name__
        for block in blocks
        for module in block.modules()
        if ("attention" in type(module).__name__.lower() or "indexer" in type(module).__name__.lower())
        if "arange" in _names(module) and not hasattr(module, "attn_temperature_tuning")
    }
    for name in sorted(counting):
        yield Obstacle(f"{name} counts positions from the beginning of the part that it gets", fix)
