"""What a dry run says that a rank has in memory is what an engine there has, to the byte."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import polyreme
import probe
import threads
import training
from cover import ALL, cover
from polyreme.config import Config
from polyreme.placement.memory_model import working_set
from polyreme.step.memory.dry_run import place
from polyreme.step.settings import run_settings

MESHES = ({}, {"tp": 2}, {"pp": 2}, {"dp": 4}, {"tp": 2, "pp": 2})
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"memory": {"states": "host", "params": "host"}},
    "files": {"memory": {"states": "files", "params": "files"}},
    "share": {"memory": {"states": {"host": 0.6, "device": 0.4}}},
    "8bit": {"optimizer": {"states": "8bit"}},
    "bf16 host": {"optimizer": {"states": "bf16"}, "memory": {"states": "host"}},
}


def foreseen(rank: int, model: nn.Module, config: Config) -> dict[str, Any]:
    placed = place(model, run_settings(config, torch.device("cpu")), rank)
    works = working_set(placed.placement, config.zero.prefetch)
    works["states"] += placed.sharded_optimizer.nbytes
    return {"memory": placed.memory, "working set": works}


def real(rank: int, world: int, family: str, config: Config) -> dict[str, Any]:
    engine = polyreme.initialize(models.build(family, torch.float32), config, loss_fn=models.CASES[family][2])
    batch = models.batch_of(family, training.SAMPLES)
    share = models.share(batch, engine.mesh.dp.rank, engine.mesh.dp.size)
    for _ in range(2):
        engine.train_step(share)
    found = engine.memory()
    for category in [category for category in found if category.startswith("activations")]:
        del found[category]
    found["gradients"] -= probe.pool(engine).waiting
    works = engine.working_set()
    del works["activations"]
    engine.close()
    return {"memory": found, "working set": works}


def cases() -> list[tuple[Any, ...]]:
    """Every value once; with --all-cases every two together. `gpt2`: its head is tied to the embedding, which
    both ends of a pipeline have."""
    stages, computes, families = (0, 1, 2, 3), ("fp32", "bf16", "fp16"), ("gpt2", "llama")
    size = 2 if ALL in os.environ else 1
    product = list(itertools.product(MESHES, stages, computes, TIERS, (1, 2), families))
    return cover(product, lambda case: itertools.combinations(enumerate(map(str, case)), size))


OTHERS: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"zero": {"stage": 3, "shard_over": 2}}),
    (2, {"zero": {"stage": 3, "quantized_weights": True, "persistence_threshold": 50}}),
    (2, {"zero": {"stage": 3, "keep": ["model.layers.0"], "bucket_size": 4096}}),
    (2, {"optimizer": {"name": "muon"}}),
    (2, {"optimizer": {"name": "lamb"}, "memory": {"states": "host"}}),
    (2, {"optimizer": {"name": "sgd", "momentum": 0.9}, "memory": {"states": "host", "gradients": "host"}}),
    (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}}),
)


def compare(world: int, family: str, config: Config) -> list[str]:
    wrong = []
    for rank, found in enumerate(threads.run(world, real, family, config)):
        with torch.device("meta"):
            model = models.build(family, torch.float32)
        for what, said in foreseen(rank, model, config).items():
            if said != found[what]:
                wrong.append(f"{what} of rank {rank}: {said}, not {found[what]}")
    return wrong


def test_a_dry_run_is_what_ranks_have(tmp_path: Path) -> None:
    wrong = []
    for mesh, stage, compute, tier, several, family in cases():
        sections = {**TIERS[tier], "zero": {"stage": stage}, "precision": {"compute": compute}, "mesh": mesh}
        memory = {k: str(tmp_path) if v == "files" else v for k, v in sections.get("memory", {}).items()}
        if stage < 3:
            memory.pop("params", None)
        world = 4 if len(mesh) == 2 or mesh == {"dp": 4} else 2
        dp = world // (mesh.get("tp", 1) * mesh.get("pp", 1))
        config = Config.load(training.config(dp, several, **{**sections, "memory": memory})).resolve(world)
        wrong += [f"{family}, {sections}: {each}" for each in compare(world, family, config)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("world", "sections"), OTHERS if ALL in os.environ else OTHERS[:2])
def test_a_dry_run_of_other_ways(world: int, sections: dict[str, Any]) -> None:
    dp = world // sections.get("mesh", {}).get("pp", 1)
    wrong = compare(world, "llama", Config.load(training.config(dp, 1, **sections)).resolve(world))
    assert not wrong, "\n".join(wrong)
