"""A simulated rank whose sequences are divided sends, counts and keeps what a real one does."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import models
import polyreme
import threads
from examples import whole
from polyreme.config import Config
from polyreme.engine import Engine
from polyreme.sequence.methods import Method
from polyreme.simulation import simulated

RANKS = 4


def seen(engine: Engine) -> list[Any]:
    before = engine.traffic()
    result = engine.train_step(models.tokens(4, 13))
    sent = {}
    for axis, counts in engine.traffic().items():
        for name, count in counts.items() if axis.startswith("cp") else ():
            then = before.get(axis, {}).get(name, (0, 0))
            sent[axis, name] = [now - earlier for now, earlier in zip(count, then, strict=True)]
    return [sent, engine.memory(), result.tokens, result.samples]


def real(rank: int, world: int, config: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    with polyreme.initialize(models.llama(num_hidden_layers=2), config) as engine:
        return seen(engine)


@pytest.mark.parametrize("activations", ["recompute", pytest.param("keep", marks=whole)])
@pytest.mark.parametrize("method", ["ring", *(pytest.param(m, marks=whole) for m in get_args(Method)[1:])])
def test_a_simulated_rank_does_what_a_real_one_does(method: Method, activations: str) -> None:
    config = {
        "batch": {"size": 4, "micro": 2},
        "zero": {"stage": 3, "min_bucket": 0},
        "context": {"method": {"ulysses": 2, "ring": 2} if method == "mix" else method},
        "memory": {"activations": activations},
        "mesh": {"cp": RANKS},
    }
    expected = threads.run(RANKS, real, config)[0]
    with simulated(
        lambda: models.llama(num_hidden_layers=2), Config.load(config).resolve(RANKS), 0
    ) as engine:
        assert seen(engine) == expected
    assert expected[2:] == [4 * 13, 4]
