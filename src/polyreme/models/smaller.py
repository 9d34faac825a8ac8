"""A smaller model by the same code: fewer blocks, and narrower ones, of a Hugging Face config.

Invariant: every stage has a block, and every tensor-parallel rank a key-value head, as far as the model has
them; a block has the modules that it had. No communication."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyreme.errors import named
from polyreme.models import huggingface

WIDE = 8
"""The width of an MLP is a multiple of so many for each tensor-parallel rank."""


def shrunk(
    path: str | None, config: Mapping[str, Any] | None, trust: bool, tp: int, stages: int
) -> tuple[dict[str, Any], str]:
    """Return the config of a smaller model, for `tp` ranks that share the heads and so many pipeline stages,
    and what was changed."""
    loaded = huggingface.read_config(path, config, trust)
    changed: list[str] = []

    def change(name: str, value: int) -> None:
        if (before := getattr(loaded, name, None)) is not None and value < before:
            setattr(loaded, name, value)
            changed.append(f"{name} {before} -> {value}")

    blocks, wide = loaded.num_hidden_layers, loaded.hidden_size
    change("num_hidden_layers", max(stages, 2))
    heads = loaded.num_attention_heads
    shared = getattr(loaded, "num_key_value_heads", None) or heads
    kept = math.lcm(tp, 2) if shared % math.lcm(tp, 2) == 0 else shared
    fewer = min(heads // shared * kept, heads)
    if wide % heads == 0 and fewer % tp == 0:
        if getattr(loaded, "head_dim", None) is None:
            change("hidden_size", wide // heads * fewer)
        else:
            change("hidden_size", max(wide * fewer // heads, 1))
        change("num_attention_heads", fewer)
        if getattr(loaded, "num_key_value_heads", None) is not None:
            change("num_key_value_heads", kept)
        unit = WIDE * tp
        if (inner := getattr(loaded, "intermediate_size", None)) is not None:
            change("intermediate_size", max(inner * fewer // heads // unit, 1) * unit)
    for name, value in vars(loaded).items():  # one entry for each block
        if isinstance(value, list) and len(value) == blocks:
            setattr(loaded, name, value[: loaded.num_hidden_layers])
    return {**loaded.to_dict(), "model_type": loaded.model_type}, named(changed, 9)
