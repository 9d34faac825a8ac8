"""What is never whole takes no memory: logits with `context.loss_chunk`, the middle of MLPs with
`context.mlp_tile`. With both, four ranks of mesh.cp train on four times the tokens of one in its memory."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import models
from examples import whole
from polyreme.config import Config
from polyreme.planner.dry_run import dry_run
from polyreme.planner.trace import RankTrace

VOCABULARY, LAYERS, WIDE, LENGTH, CHUNK = 4096, 2, 2048, 256, 16
LIGHT = {"loss_chunk": CHUNK, "mlp_tile": CHUNK}


def model() -> nn.Module:
    return models.llama(
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        intermediate_size=WIDE,
        max_position_embeddings=4 * LENGTH,
    )


@cache
def step(
    length: int = LENGTH, cp: int = 1, tp: int = 1, recompute: bool = False, **context: int
) -> RankTrace:
    """A rank's step on one sequence of so many tokens."""
    config = Config.load(
        {
            "batch": {"size": 1},
            "zero": {"min_bucket": 0, "stage": 3},
            "mesh": {"cp": cp, "tp": tp},
            "memory": {"activations": "recompute" if recompute else "keep"},
            "context": {"method": "ring", **context},
        }
    )

    def batch(samples: int) -> dict[str, Tensor]:
        ids = torch.randint(3, VOCABULARY, (samples, length))
        return {"input_ids": ids, "labels": ids}

    return dry_run(model, config.resolve(cp * tp), 0, batch=batch)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=whole)])
def test_logits_are_never_whole(tp: int) -> None:
    """Without chunks there are two of them at the peak, or their gradient beside them."""
    logits = 4 * LENGTH * VOCABULARY // tp
    kept, chunked = step(tp=tp).memory, step(tp=tp, loss_chunk=CHUNK).memory
    assert kept.peak - chunked.peak > 1.9 * logits
    assert kept.by_category["activations"] - chunked.by_category["activations"] > logits


def test_the_middle_of_mlps_is_never_whole() -> None:
    """Without tiles each layer keeps three of them at least: gate, its activation, and what goes up."""
    saved = step().memory.peak - step(mlp_tile=CHUNK).memory.peak
    assert saved > 3 * LAYERS * 4 * LENGTH * WIDE


def test_four_ranks_train_on_four_times_the_tokens_of_one_in_its_memory() -> None:
    one = step(recompute=True, **LIGHT).memory
    four = step(4 * LENGTH, cp=4, recompute=True, **LIGHT).memory
    assert four.peak < one.peak  # as states are divided, too
    held = [each.by_category["activations"] + each.by_category["temporary"] for each in (one, four)]
    assert held[1] < 1.1 * held[0]
    # of one layer, some tensors of the hidden width for each token, and the middle of one tile of its MLP
    hidden, middle = 2 * 4 * LENGTH * 32 * (LAYERS + 4), 3 * 4 * CHUNK * WIDE
    assert one.by_category["activations"] < hidden + middle
