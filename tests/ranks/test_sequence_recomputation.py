"""Recomputed blocks whose sequences are divided over ranks: they send nothing twice, and what is kept for
that is counted."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import models
import polyreme
import threads
from examples import whole
from polyreme.sequence.methods import Method

SAMPLES, LENGTH, BLOCKS = 4, 16, 2


def seen(rank: int, world: int, method: Method, activations: str) -> list[Any]:
    torch.manual_seed(0)
    config = {
        "batch": {"size": SAMPLES, "micro": SAMPLES},
        "precision": {"compute": "fp64"},
        "context": {"method": {"ulysses": 2, "ring": 2} if method == "mix" else method},
        "mesh": {"cp": world},
        "memory": {"activations": activations},
    }
    with polyreme.initialize(models.llama(num_hidden_layers=BLOCKS).double(), config) as engine:
        losses = [engine.train_step(models.tokens(SAMPLES, LENGTH)).loss for _ in range(2)]
        memory, traffic = engine.memory(), engine.traffic()
        kept = memory["activations"], memory.get("activations_host", 0)
        return [losses, {axis: counts for axis, counts in traffic.items() if axis.startswith("cp")}, kept]


@pytest.mark.parametrize("method", ["ring", *(pytest.param(m, marks=whole) for m in get_args(Method)[1:])])
def test_a_recomputation_sends_nothing(method: Method) -> None:
    (losses, sent, kept), (again, sent_again, kept_again) = (
        threads.run(4 if method == "mix" else 2, seen, method, activations)[0]
        for activations in ("keep", "recompute")
    )
    assert again == losses
    assert sent and sent_again == sent
    assert kept_again < kept


def test_what_is_kept_for_it_is_counted_where_it_is() -> None:
    ranks, model = 2, models.llama(num_hidden_layers=BLOCKS).config
    heads, width = model.num_attention_heads, model.hidden_size // model.num_attention_heads
    # the output, and a log-sum-exp for each head
    more = BLOCKS * SAMPLES * LENGTH // ranks * heads * (width + 1) * 8
    found = {
        (n, activations): threads.run(n, seen, "ring", activations)[0]
        for n in (1, ranks)
        for activations in ("recompute", "host")
    }
    assert found[ranks, "host"][:2] == found[ranks, "recompute"][:2]
    for activations in ("recompute", "host"):
        (_, _, alone), (_, _, divided) = found[1, activations], found[ranks, activations]
        few = 300  # bytes of what is not divided, or counted in both places
        assert sum(divided) == pytest.approx(sum(alone) / ranks + more, abs=few)
    assert found[ranks, "host"][2][1] > found[ranks, "host"][2][0] / 2
