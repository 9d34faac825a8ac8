"""The benchmark's Llama as pipeline stages written by hand, for the systems that want them so.

Invariant: `counts` is the cut of every system, ours too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def counts(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage, as even as can be."""
    return [blocks // stages + (stage < blocks % stages) for stage in range(stages)]


class Stage(nn.Module):
    """One stage: token ids (first) or hidden states in, hidden states or logits (last) out."""

    def __init__(self, model: Any, index: int, stages: int) -> None:
        super().__init__()
        cut = counts(len(model.model.layers), stages)
        start = sum(cut[:index])
        self.embedding = model.model.embed_tokens if index == 0 else None
        self.rotary = model.model.rotary_emb
        self.blocks = nn.ModuleList(model.model.layers[start : start + cut[index]])
        last = index == stages - 1
        self.norm: Any = model.model.norm if last else None
        self.head: Any = model.lm_head if last else None

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        positions = self.rotary(hidden, torch.arange(hidden.shape[1]).unsqueeze(0))
        for block in self.blocks:
            hidden = block(hidden, position_embeddings=positions)  # without a mask, attention is causal
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def loss_of(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's own loss, of logits and labels."""
    function, vocabulary = model.loss_function, model.config.vocab_size

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        mean: Tensor = function(logits, labels, vocabulary)
        return mean

    return loss
