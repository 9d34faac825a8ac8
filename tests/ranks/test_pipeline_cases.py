"""Pipelines of models and batches that are not the usual ones still compute what one process computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import polyreme
import threads
import training
from polyreme.errors import BatchError
from polyreme.pipeline.schedule import NAMES

STEPS = 2


def layers(kinds: str) -> nn.Sequential:
    """Of each letter a layer: t trainable, f frozen, n without parameters."""
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Tanh() if kind == "n" else nn.Linear(9, 9) for kind in kinds)).double()
    for kind, layer in zip(kinds, made, strict=True):
        layer.requires_grad_(kind == "t")
    return made


def settings(microbatches: int = 4, **sections: Any) -> dict[str, Any]:
    return training.config(1, microbatches, precision={"compute": "fp64"}, **{"mesh": {"pp": 2}, **sections})


def plain(model: nn.Module, loss_fn: Any, batches: list[Any]) -> training.Run:
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    with models.Wide():
        return models.plain_training(model, loss_fn, batches, optimizer, clip=1.0)


def divided(model: nn.Module, loss_fn: Any, batches: list[Any], config: dict[str, Any]) -> training.Run:
    engine = polyreme.initialize(model, config, loss_fn=loss_fn)
    with models.Wide():
        results = [engine.train_step(batch) for batch in batches]
    return [(result.loss, result.grad_norm) for result in results], engine.state_dict()


def vectors() -> list[Any]:
    return [tuple(part.double() for part in models.vectors(training.SAMPLES, seed)) for seed in range(STEPS)]


PARTLY: list[tuple[str, dict[str, Any]]] = [
    ("ttff", {"zero": {"stage": 0}}),
    ("fftt", {"zero": {"stage": 3}}),
    ("tfff", {"pipeline": {"schedule": "zb-h1"}}),
    ("ffft", {"pipeline": {"schedule": "interleaved"}}),
    ("ftft", {"pipeline": {"schedule": "zb-v"}}),
    ("tn", {}),
    ("nt", {"zero": {"stage": 3}, "memory": {"activations": "recompute"}}),
    ("nttn", {"pipeline": {"schedule": "zb-v"}}),
]


def partly_trainable(rank: int, world: int) -> None:
    for kinds, sections in PARTLY:
        expected, config = plain(layers(kinds), F.mse_loss, vectors()), settings(**sections)
        torch.testing.assert_close(
            divided(layers(kinds), F.mse_loss, vectors(), config),
            expected,
            rtol=1e-10,
            atol=1e-10,
            msg=lambda m, at=(kinds, sections): f"{at}: {m}",
        )


def test_stages_that_are_frozen_or_have_no_parameters() -> None:
    threads.run(2, partly_trainable)


def lengths(rank: int, world: int) -> None:
    batches = [models.tokens(training.SAMPLES, length, seed=length) for length in (12, 7, 12, 16)]
    build = lambda: models.llama(num_hidden_layers=4).double()  # noqa: E731
    torch.manual_seed(0)
    expected = plain(build(), models.causal_loss, batches)
    for schedule in NAMES:
        torch.manual_seed(0)
        found = divided(build(), models.causal_loss, batches, settings(pipeline={"schedule": schedule}))
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=1e-10, msg=lambda m, at=schedule: f"{at}: {m}"
        )


def test_batches_that_change_their_length() -> None:
    threads.run(2, lengths)


def few(rank: int, world: int) -> None:
    expected = plain(layers("tttt"), F.mse_loss, vectors())
    for schedule in NAMES:
        found = divided(layers("tttt"), F.mse_loss, vectors(), settings(1, pipeline={"schedule": schedule}))
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=1e-10, msg=lambda m, at=schedule: f"{at}: {m}"
        )


def test_fewer_micro_batches_than_stages() -> None:
    threads.run(2, few)


def overflow(rank: int, world: int) -> None:
    """A gradient that overflows on one rank, whichever it is, makes all skip the step and halve the scale;
    then training goes on."""
    precision = {"compute": "fp16", "initial_scale": 2.0**10}
    torch.manual_seed(0)
    engine = polyreme.initialize(
        models.llama(), training.config(1, 2, mesh={"tp": 2, "pp": 2}, precision=precision)
    )
    batch = models.tokens(training.SAMPLES)
    bad: int | None = None
    own = next(p for name, p in engine.module.named_parameters() if name.endswith("up_proj.weight"))
    own.register_hook(lambda gradient: gradient * math.inf if rank == bad else None)
    scale = 2.0**10
    for bad in (None, 0, 1, 2, 3, None):
        before = engine.state_dict(master=True)
        result = engine.train_step(batch)
        same = all(
            torch.equal(tensor, before[name]) for name, tensor in engine.state_dict(master=True).items()
        )
        assert result.skipped == same == (bad is not None), bad
        scale = scale / 2 if result.skipped else scale
        assert engine.state.loss_scale == scale and math.isfinite(result.loss)


def test_an_overflow_on_one_rank_of_any_axis_skips_on_all() -> None:
    threads.run(4, overflow)


def unlike(rank: int, world: int) -> None:
    for sizes in ({"pp": 2}, {"tp": 2}):
        torch.manual_seed(0)
        model = models.llama(num_hidden_layers=2)
        engine = polyreme.initialize(model, training.config(1, 2, mesh=sizes), loss_fn=models.causal_loss)
        with pytest.raises(BatchError, match=f"ranks of one {next(iter(sizes))} line have different batches"):
            engine.train_step(models.tokens(training.SAMPLES, seed=rank))
        engine.train_step(models.tokens(training.SAMPLES))
        engine.train_step(models.tokens(training.SAMPLES, seed=1))


def test_ranks_that_compute_one_batch_must_be_given_one() -> None:
    threads.run(2, unlike)
