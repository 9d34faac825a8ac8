"""A model with several lists of blocks that a pipeline refuses trains as plain torch does in the way that the
refusal names, and one whose tower is small beside its language model trains on pipeline stages: losses,
gradient norms and weights, in float64."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import transformers
from test_tensor_advice import IMAGE, IMAGES, SAMPLES, batch_of, small
from torch import Tensor, nn

import polyreme
import threads
from examples import ALL
from models import Wide
from pool import RanksFailed
from tiny_families import build, tiny

STEPS, TOLERANCE = 3, 1e-10
RATE, DECAY, CLIP = 1e-2, 0.1, 0.05
REFUSED = ("gemma3", "t5", "bart", "llava", "qwen2_vl")
CUT = ("llava", "gemma3", "lfm2", "mamba2", "qwen2_vl")
"""Families that a pipeline cuts: those with a tower have a wide language model."""

Trained = tuple[list[float], dict[str, Tensor]]


def make(kind: str, wide: bool) -> nn.Module:
    if kind == "bart":  # whose causal language model is the decoder alone
        torch.manual_seed(3)
        return transformers.BartForConditionalGeneration(small(kind)).double().train()
    if kind == "mamba2":
        return build(tiny(transformers.Mamba2Config, num_heads=8, head_dim=8, n_groups=1))
    config = small(kind)
    if wide and kind in IMAGES:
        config.text_config.intermediate_size = 2048
    return build(config)


def micro_batches(kind: str, model: nn.Module, step: int) -> list[dict[str, Tensor]]:
    """Two, of as many labels each; of texts alone the first, as in a mixed data set."""
    found = [batch_of(kind, model, 2 * step + i) for i in range(2)]
    if kind in IMAGES:
        texts = found[0]
        texts["input_ids"] = torch.where(texts["input_ids"] == IMAGE, 7, texts["input_ids"])
        found[0] = {name: texts[name] for name in ("input_ids", "labels", "attention_mask")}
        if kind == "gemma3":
            found[0]["token_type_ids"] = torch.zeros_like(texts["input_ids"])
    return found


@functools.cache
def plain(kind: str, wide: bool) -> Trained:
    """By torch alone."""
    model, records = make(kind, wide), list[float]()
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() < 2) == vectors], "weight_decay": decay}
        for vectors, decay in ((True, 0.0), (False, DECAY))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    with Wide():
        for step in range(STEPS):
            losses = [model(**batch).loss / 2 for batch in micro_batches(kind, model, step)]
            optimizer.zero_grad()
            sum(losses).backward()  # type: ignore[union-attr]
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            records += [sum(loss.item() for loss in losses), norm.item()]
    return records, {name: p.detach() for name, p in model.named_parameters()}


def train(rank: int, world: int, kind: str, wide: bool, sections: dict[str, Any]) -> Trained:
    model, records = make(kind, wide), list[float]()
    settings = {
        "precision": {"compute": "fp64"},
        "batch": {"size": 2 * SAMPLES, "micro": SAMPLES},
        "optimizer": {
            "name": "adamw", "lr": RATE, "weight_decay": DECAY, "clip": CLIP,
            "betas": [0.9, 0.999], "eps": 1e-8,
        },
    }  # fmt: skip
    engine = polyreme.initialize(model, settings | sections)
    dp = engine.mesh.dp
    with Wide():
        for step in range(STEPS):
            result = engine.train_step(micro_batches(kind, model, step)[dp.rank :: dp.size])
            records += [result.loss, result.grad_norm]
    weights = engine.state_dict()
    engine.close()
    return records, weights


def assert_as_plain(kind: str, wide: bool, sections: dict[str, Any]) -> None:
    records, weights = plain(kind, wide)
    for found, numbers in threads.run(2, train, kind, wide, sections):
        torch.testing.assert_close(found, records, rtol=TOLERANCE, atol=TOLERANCE)
        for name, expected in weights.items():
            torch.testing.assert_close(numbers[name], expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED if ALL in os.environ else REFUSED[:2])
def test_the_way_that_a_refusal_names_trains_as_plain_torch_does(kind: str) -> None:
    said = r"several lists of blocks.*set mesh\.pp = 1; zero\.stage = 3 shards the parameters of them all"
    with pytest.raises(RanksFailed, match=said):
        threads.run(2, train, kind, False, {"mesh": {"pp": 2}})
    assert_as_plain(kind, False, {"mesh": {"pp": 1}, "zero": {"stage": 3}})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CUT if ALL in os.environ else CUT[:1])
def test_a_language_model_is_cut_beside_a_small_tower(kind: str) -> None:
    assert_as_plain(kind, True, {"mesh": {"pp": 2}})
