"""A PEFT model in a checkpoint: PEFT opens its adapters on a fresh base, and an engine goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import models
import polyreme
import training
from polyreme import model_map
from pool import Ranks


def adapted(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(models.build("llama"), config)


def two_adapters() -> nn.Module:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj"]))
    return model


def plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(2):
        batch = models.tokens(training.SAMPLES, seed=step)
        total, weight = models.causal_loss(model(**batch), batch)
        optimizer.zero_grad()
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((total / weight).item())
    return losses


def saved(rank: int, world: int, folder: Path) -> None:
    cases = {"head": lambda: adapted(modules_to_save=["lm_head"]), "two": two_adapters}
    for name, make in cases.items():
        expected = plain(make())
        for stage in (3,) if name == "head" else (2 if world > 1 else 0,):
            config = training.config(world, zero={"stage": stage}, precision={"compute": "fp64"})
            engine = polyreme.initialize(make(), config, loss_fn=models.causal_loss)
            batches = [models.share(models.tokens(training.SAMPLES, seed=step), rank, world) for step in range(3)]
            assert [engine.train_step(batch).loss for batch in batches[:2]] == pytest.approx(expected, rel=1e-10), (name, stage)
            path = engine.save(folder / f"{name}-{stage}")
            opened = peft.PeftModel.from_pretrained(models.build("llama"), path).double()
            if name == "two":
                opened.load_adapter(path / "other", "other")
            whole = engine.state_dict()
            assert opened.state_dict().keys() == whole.keys()
            assert all(torch.equal(tensor, whole[key]) for key, tensor in opened.state_dict().items()), (name, stage)
            assert len(load_file(path / "adapter_model.safetensors")) == 12 + (name == "head")
            after = engine.train_step(batches[2]).loss
            again = polyreme.initialize(make(), config, loss_fn=models.causal_loss)
            again.load(path)
            assert again.train_step(batches[2]).loss == after


@pytest.mark.parametrize("world", [1, 2])
def test_peft_opens_what_was_saved(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world, saved, tmp_path)


def test_labels_are_counted_as_by_the_base() -> None:
    model, batch = adapted(), models.tokens(2)
    count = model_map.count_labels
    assert count(model, batch) == count(models.build("llama"), batch) == int((batch["labels"][:, 1:] != -100).sum())
    assert model_map.training_arguments(model) == {"use_cache": False}
