"""What every system trains: one model, one optimizer, one stream of tokens.

Invariant: everything here depends on the size, the seed and the step only, never on the system, so the losses
of two systems can differ by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Decay on every parameter and no schedule: the one setting that all systems can be given identically.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0


@dataclass(frozen=True)
class Llama:
    """The shape of a Llama with untied embeddings."""

    hidden: int
    blocks: int
    vocabulary: int
    heads: int
    intermediate: int


# 0.2M: to try the benchmark itself
SIZES = {
    "tiny": Llama(hidden=64, blocks=2, vocabulary=512, heads=4, intermediate=176),
    "12m": Llama(hidden=256, blocks=10, vocabulary=8192, heads=4, intermediate=704),  # 12.2M
    "60m": Llama(hidden=512, blocks=16, vocabulary=8192, heads=8, intermediate=1408),  # 59.8M
    "220m": Llama(hidden=1024, blocks=16, vocabulary=8192, heads=16, intermediate=2816),  # 222M
    # two blocks of some width, for those who look at blocks alone
    **{
        f"h{width}": Llama(width, 2, 128, max(2, width // 64), width * 11 // 4)
        for width in (64, 256, 512, 1024)
    },
}


@dataclass(frozen=True)
class Job:
    """What one rank of one system is asked to train. `batch` counts samples per rank, `sequence` tokens per
    sample, `microbatches` the parts into which a pipeline cuts the batch of all ranks. What a system keeps in
    files goes to `folder`."""

    system: str
    size: str
    dtype: str
    batch: int
    sequence: int
    rank: int
    world: int
    threads: int
    suite: str = "step"
    microbatches: int = 1
    folder: str = ""


class Outcome(NamedTuple):
    """One step as the system tells it: the loss (of the rank or of the group) and the gradient norm before
    clipping."""

    loss: float
    grad_norm: float | None


Batch = dict[str, torch.Tensor]


def build_model(size: str) -> LlamaForCausalLM:
    """The fp32 model of this size, the same on every call."""
    shape = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return LlamaForCausalLM(config).train()


def build_batch(job: Job, step: int, ranks: Iterable[int]) -> Batch:
    """Token ids (samples, sequence), int64, of these ranks in this step; skewed, so that there is a loss to
    lower."""
    shares = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1 + step * job.world + rank)
        uniform = torch.rand(job.batch, job.sequence, generator=generator, dtype=torch.float64)
        shares.append((uniform**3 * SIZES[job.size].vocabulary).long())
    tokens = torch.cat(shares)
    return {"input_ids": tokens, "labels": tokens}
