"""Checkpoints of an engine, changed somewhere by chance: each is refused and changes nothing, or loads as if
it had not been changed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from test_checkpoint_huggingface import corrupt
from transformers import GPT2Config, GPT2LMHeadModel

import polyreme
import probe
from polyreme.errors import CheckpointError


def make(limit: int) -> polyreme.Engine:
    """A small model with dropout, whose checkpoints have files of at most `limit` bytes of tensors."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    settings = {"batch": {"size": 2}, "precision": {"compute": "bf16"}, "checkpoint": {"file_size": limit}}
    return polyreme.initialize(model, settings)


def everything(engine: polyreme.Engine) -> tuple[Any, ...]:
    """All that a load may change."""
    found = probe.saved(engine)
    tensors = [
        (region.kind, region.names, region.data.detach().clone().view(torch.uint8).numpy().tobytes())
        for region in found.regions
    ]
    return sorted(tensors), dict(found.resume.state), dict(found.resume.data), dict(found.rng)


def fuzz(folder: Path, corruptions: int, limit: int) -> Counter[str]:
    """How many of so many corruptions of a checkpoint were found, and how many were harmless, by their kind.
    Raises AssertionError where one was loaded wrongly, or refused after something had changed; and whatever
    else than CheckpointError a load raised."""
    engine, random_ = make(limit), random.Random(limit)
    loader = engine.loader(
        [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(8)]
    )
    batches = iter(loader)
    engine.train_step(next(batches))
    engine.save(folder / "original")
    saved = everything(engine)
    engine.train_step(next(batches))
    engine.save(folder / "other")
    other = everything(engine)
    assert all(one != two for one, two in zip(saved, other, strict=True)), (
        "a load that changed anything would be seen"
    )
    results: Counter[str] = Counter()
    for _ in range(corruptions):
        shutil.copytree(folder / "original", folder / "step")
        what = corrupt(folder / "step", random_)
        try:
            engine.load(folder / "step")
        except CheckpointError:
            assert everything(engine) == other, f"refused, but not before something had changed: {what}"
            results[f"found {what.split()[0]}"] += 1
        else:
            assert everything(engine) == saved, f"loaded wrongly: {what}"
            results[f"harmless {what.split()[0]}"] += 1
            engine.load(folder / "other")
        shutil.rmtree(folder / "step")
    return results


def test_corruptions_are_found_or_harmless(tmp_path: Path) -> None:
    for limit, name in ((10**9, "one"), (1000, "several")):
        results = fuzz(tmp_path / name, 50, limit)
        assert (
            results.total() == 50
            and sum(count for what, count in results.items() if what.startswith("found ")) > 30
        )
