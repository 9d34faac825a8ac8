"""Divided over pipeline stages and tensor parallelism, too, a run computes what one process computes: float64, to 1e-10."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import models
import polyreme
from pool import Ranks

STEPS, SAMPLES, CLIP = 5, 8, 0.05

Record = tuple[float, float]


def model_of(family: str) -> nn.Module:
    """In float64, and norms, too, which transformers computes in float32."""
    torch.manual_seed(0)
    build = {
        "llama": lambda: models.llama(num_hidden_layers=5),
        "llama tied": lambda: models.llama(num_hidden_layers=5, tie_word_embeddings=True),
        "gpt2": lambda: models.gpt2(blocks=5),
    }[family]
    return build().double().train()


def settings(sizes: Mapping[str, int], **sections: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "mesh": dict(sizes),
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES, "micro": 1 if sizes.get("pp", 1) > 1 else 2},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip": CLIP},
    }
    zero = {"min_bucket": 0, **sections.pop("zero", {})}
    return {**defaults, **sections, "zero": zero, "mesh": {**sizes, **sections.get("mesh", {})}}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    batch = models.tokens(SAMPLES, seed=step)
    batch["labels"][0, :5] = -100  # so that ranks and micro-batches differ in weight
    return batch


def train(rank: int, world: int, family: str, each: list[dict[str, Any]]) -> list[tuple[list[Record], dict[str, Any], dict[str, Any]]]:
    """Records, evaluation and final weights of a run under each of the settings."""
    results = []
    for config in each:
        engine = polyreme.initialize(model_of(family), config, loss_fn=models.causal_loss)
        dp = engine.mesh.dp
        records = []
        for step in range(STEPS):
            result = engine.train_step(models.share(batch_of(step), dp.rank, dp.size))
            records.append((result.loss, result.grad_norm))
        evaluated = engine.eval_step(models.share(batch_of(STEPS), dp.rank, dp.size))
        results.append(([*records, (evaluated.loss, evaluated.weight)], engine.state_dict(rank0_only=True), engine.traffic()))
    return results


@functools.cache
def expected(family: str) -> tuple[list[Record], dict[str, Any]]:
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    model = model_of(family)
    records, weights = models.plain_training(model, models.causal_loss, [batch_of(step) for step in range(STEPS)], optimizer, CLIP)
    with torch.no_grad():
        batch = batch_of(STEPS)
        loss, weight = models.causal_loss(model.eval()(input_ids=batch["input_ids"]), batch)
    return [*records, ((loss / weight).item(), float(weight))], weights


def compare(results: list[Any], family: str, each: list[dict[str, Any]]) -> None:
    records, weights = expected(family)
    for i, config in enumerate(each):
        at = {key: config[key] for key in ("mesh", "zero", "pipeline") if key in config}
        for result in results:
            torch.testing.assert_close(result[i][0], records, rtol=1e-10, atol=1e-10, msg=lambda m, at=at: f"{family} {at}: {m}")
        assert results[0][i][1].keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(results[0][i][1][name], tensor, rtol=1e-10, atol=1e-10,
                                       msg=lambda m, n=name, at=at: f"{family} {n} {at}: {m}")  # fmt: skip


PIPELINES: dict[int, list[dict[str, Any]]] = {
    2: [settings({"pp": 2}, pipeline={"schedule": schedule, "virtual": 2}) for schedule in ("gpipe", "1f1b", "interleaved")],
    4: [
        *(settings({"pp": 2}, zero={"stage": stage}) for stage in (0, 1)),
        *(settings({"pp": 2}, zero={"stage": 2, "reduce_every": each}) for each in ("step", "microbatch")),
        *(settings({"pp": 2}, zero={"stage": stage}, pipeline={"schedule": "interleaved"}) for stage in (1, 3)),
        settings({"pp": 2}, zero={"stage": 3}, memory={"activations": "recompute"}),
        settings({"pp": 4}, pipeline={"blocks": [1, 1, 2, 1]}),
    ],
}


@pytest.mark.parametrize("world", PIPELINES)
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2"])
def test_pipeline_equals_plain_pytorch(ranks: Ranks, family: str, world: int) -> None:
    compare(ranks(world, train, family, PIPELINES[world], timeout=120), family, PIPELINES[world])


TENSORS: dict[int, list[dict[str, Any]]] = {
    2: [
        settings({"tp": 2}),
        settings({"tp": 2, "sequence_parallel": True}),
        settings({"tp": 2, "sequence_parallel": True}, memory={"activations": "recompute"}),
    ],
    4: [
        *(settings({"tp": 2}, zero={"stage": stage}) for stage in (0, 1)),
        *(settings({"tp": 2, "sequence_parallel": True}, zero={"stage": stage}) for stage in (2, 3)),
        settings({"tp": 2, "pp": 2}),
        settings({"tp": 2, "pp": 2, "sequence_parallel": True}, pipeline={"schedule": "interleaved"}),
        settings({"tp": 4}),
    ],
}


@pytest.mark.parametrize("world", TENSORS)
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2"])
def test_tensor_parallelism_equals_plain_pytorch(ranks: Ranks, family: str, world: int) -> None:
    compare(ranks(world, train, family, TENSORS[world], timeout=120), family, TENSORS[world])
