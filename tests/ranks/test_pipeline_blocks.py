"""`pipeline.blocks = "time"`: rank 0 measures, and every rank cuts the model alike."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import models
import polyreme
import polyreme.placement.dividing
import training
from polyreme.errors import ConfigError, ModelError
from pool import Ranks

BLOCKS = 5


def settings(world: int, how: Any = "time", **mesh: int) -> dict[str, Any]:
    dp = world // (2 * mesh.get("tp", 1))
    return training.config(
        dp,
        2,
        mesh={"pp": 2, **mesh},
        pipeline={"blocks": how},
        data={"sequence": 12},
        precision={"compute": "fp64"},
    )


def burn(block: nn.Module, args: tuple[Any, ...]) -> None:
    """Time that no parameter tells of."""
    for _ in range(20):
        torch.ones(100, 100) @ torch.ones(100, 100)


def uneven() -> nn.Module:
    model = models.llama(num_hidden_layers=BLOCKS)
    model.model.layers[3].register_forward_pre_hook(burn)
    return model


def own_blocks(engine: polyreme.Engine) -> tuple[int, list[int]]:
    names = [name.split(".") for name, _ in engine.module.named_parameters()]
    return engine.mesh.pp.rank, sorted({int(name[2]) for name in names if name[1] == "layers"})


def given_seconds(rank: int, world: int) -> list[tuple[int, list[int]]]:
    """What each rank has of the blocks; others than rank 0 cannot measure."""
    measure = mock.Mock(return_value=[1, 1, 1, 5, 2]) if rank == 0 else mock.Mock(side_effect=AssertionError)
    with mock.patch.object(polyreme.placement.dividing, "block_seconds", measure):
        layouts = [settings(world), settings(world, tp=2)]
        return [
            own_blocks(polyreme.initialize(model, each)) for each in layouts for model in (uneven, uneven())
        ]


def test_all_ranks_cut_by_rank_0s_seconds(ranks: Ranks) -> None:
    for found in ranks(4, given_seconds):
        assert all(blocks == ([0, 1, 2], [3, 4])[stage] for stage, blocks in found) and len(found) == 4


def train(rank: int, world: int, how: Any) -> tuple[list[tuple[int, list[int]]], list[float]]:
    """Of a module and of a function: the blocks of this rank, and losses."""
    blocks, losses = [], []
    for model in (uneven().double(), lambda: uneven().double()):
        engine = polyreme.initialize(model, settings(world, how), loss_fn=models.causal_loss)
        blocks.append(own_blocks(engine))
        with models.Wide():
            losses += [
                engine.train_step(models.tokens(training.SAMPLES, seed=step)).loss for step in range(2)
            ]
    return blocks, losses


def test_measured_stages_compute_the_same(ranks: Ranks) -> None:
    """Which blocks they are depends on the time that was measured; not what they compute."""
    (first, losses), (second, others) = ranks(2, train, "time")
    for (stage, blocks), (other_stage, other_blocks) in zip(first, second, strict=True):
        assert (
            (stage, other_stage) == (0, 1)
            and blocks
            and other_blocks
            and blocks + other_blocks == list(range(BLOCKS))
        )
    assert losses == others
    torch.testing.assert_close(losses, ranks(2, train, "parameters")[0][1], rtol=1e-10, atol=1e-10)


def refused(rank: int, world: int) -> list[str]:
    found = []
    with pytest.raises(ConfigError) as unknown:
        polyreme.initialize(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), settings(world))
    found.append(str(unknown.value))
    with mock.patch.object(
        polyreme.placement.dividing, "block_seconds", mock.Mock(side_effect=ValueError("too long a text"))
    ):
        with pytest.raises(ModelError) as failed:
            polyreme.initialize(uneven(), settings(world))
        found.append(str(failed.value))
    return found


def test_what_cannot_be_measured_is_refused_on_every_rank(ranks: Ranks) -> None:
    for unknown, failed in ranks(2, refused):
        assert "only of Hugging Face models" in unknown and 'write pipeline.blocks = "work"' in unknown
        assert "could not be measured (ValueError: too long a text)" in failed
